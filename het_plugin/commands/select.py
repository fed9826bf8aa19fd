"""Chooses among candidates for a task, by files of their representations or predictions.

    python -m het_plugin.select knn --train=a/train.npz,b/train.npz --k=1,5,20
    python -m het_plugin.select rank --train=a/train.npz,b/train.npz --test=a/test.npz,b/test.npz
    python -m het_plugin.select ensemble --validation=a/val.npz,b/val.npz

`knn`: k-nearest-neighbour accuracy, on test files or leaving out each training example in turn; and
RankMe, the effective rank of the representations. `rank`: the same as a proxy, and the few-shot
accuracy of the --keep best candidates. `ensemble`: greedy selection of members by their validation
NLL, from the files that `het_plugin.evaluate --save_predictions` writes. `het_plugin.soup` averages
parameters, and `het_plugin.finetune` trains the best candidates.

Give one source per candidate, separated by commas or with a flag each. Files are representations
(.npz, .safetensors, F.npz:split, or X.npy,Y.npy) or predictions; a run, with :SPLIT or without, has
both. A flag that a subcommand does not read is refused.
"""

import dataclasses
import inspect
from typing import Annotated, ClassVar, Literal

from het_plugin import reporting
from het_plugin.cli.settings import Gin, OneOf, Repeated
from het_plugin.evaluation import select
from het_plugin.evaluation.candidates import split_sources
from het_plugin.measures import knn, rankme
from het_plugin.system.ranges import Count

MEASURES = {'knn': select.knn, 'rank': select.rank, 'ensemble': select.ensemble}
_READ = {name: [*inspect.signature(measure).parameters] for name, measure in MEASURES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin):
  """What is compared, and how.

  Attributes:
    train: Representations of the training split.
    validation: Predictions for the validation split.
    test: The same files of the test split, in the same order.
    names: Names of the candidates. Default: the parts in which their paths differ.
    k: Numbers of neighbours; the first one ranks.
    metric: Distance of neighbours.
    keep: Number of candidates to evaluate, or 'all'.
    shots: Examples per class.
    seeds: Seeds of few-shot subsets, one each.
    l2: Few-shot regularisation: 'loo', 'heldout' or a strength.
    max_examples: Most examples of RankMe, chosen at random.
    max_members: Largest number of members, repetitions included.
    replacement: Whether a member may be added again.
    json: Where to write the results as JSON.
    png: Where to write the plot.
    html: Where to write table, plot and command as a page.
  """

  takes_words: ClassVar[bool] = True

  train: Repeated[str] = ()
  validation: Repeated[str] = ()
  test: Repeated[str] = ()
  names: tuple[str, ...] | None = None
  k: tuple[Count, ...] = (1,)
  metric: Annotated[str, OneOf(knn.METRICS)] = 'euclidean'
  keep: str = '1'
  shots: tuple[Count, ...] = (1, 5, 10, 25)
  seeds: tuple[int, ...] = (0, 1, 2)
  l2: float | Literal['loo', 'heldout'] = 'loo'
  max_examples: Count = rankme.MAX_EXAMPLES
  max_members: Count = 10
  replacement: bool = True
  json: str | None = None
  png: str | None = None
  html: str | None = None


def run(settings: Settings) -> reporting.Report:
  """The candidates, the best one first, or an ensemble of them."""
  words = settings.words
  if len(words) != 1 or words[0] not in MEASURES:
    raise ValueError(
      f'{" ".join(["select", *words])}: write one of {", ".join(MEASURES)}; soup and finetune are '
      'commands of their own'
    )
  (measure,) = words
  for flag in sorted(settings.given.difference(_READ[measure])):
    if readers := ', '.join(name for name, flags in _READ.items() if flag in flags):
      raise ValueError(f'--{flag} has no effect on {measure}: {readers} read it')
  settings.refuse(['gin_file', 'gin_bindings'], f'{measure}, which reads files only')
  values = settings.chosen(*_READ[measure])
  for name in {'train', 'validation', 'test'} & set(values):
    values[name] = [source for text in values[name] for source in split_sources(text)]
  return MEASURES[measure](**values)
