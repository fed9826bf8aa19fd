"""Few-shot linear evaluation of saved representations, or of checkpoints.

    python -m het_plugin.fewshot --train=det/train.npz --test=det/test.npz --shots=1,5,10,25
    python -m het_plugin.fewshot --checkpoint=runs/det --checkpoint=runs/het_xl --datasets=digits

--train, --test and --checkpoint may be repeated; every run is compared with the first, paired.
Prints accuracies with standard errors over draws, their averages over data sets and settings (table
22 of Collier et al. 2023), and differences; --json and --html write them too. --results=A.json
shows results of earlier calls next to them.

A run's name is METHOD or METHOD/SETTING; averages are over data sets and the settings of a method.
Several labels of an example are votes. The most frequent one counts.

Files of several data sets make one run under --names=RUN:DATASET,RUN:DATASET.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from het_plugin import reporting
from het_plugin.cli.settings import Gin, OneOf, Processes, Repeated
from het_plugin.evaluation import fewshot as report
from het_plugin.measures import fewshot
from het_plugin.system.ranges import Count

_OF_CHECKPOINTS = ('datasets', 'splits', 'layer', 'batch_size')  # flags that belong to --checkpoint
_OF_FITS = ('protocol', 'classifier', 'draw', 'l2', 'shots', 'seeds')  # of --train or --checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, Processes):
  """What is compared, and how.

  Attributes:
    train: Representations that shots are drawn from: F.npz, F.safetensors or X.npy,Y.npy;
      F.npz:SPLIT if it has several; a run, or a task; repeatable.
    test: Representations to measure accuracies on: F.npz, F.safetensors or X.npy,Y.npy; F.npz:SPLIT
      if it has several; a run, or a task; repeatable.
    checkpoint: A run's directory, a checkpoint in it, .npz or .safetensors; repeatable.
    datasets: For checkpoints: tasks, .npz files or folders, TASK or NAME=TASK; by default those
      that gin files bind to FewShotAction.datasets, else digits and glyphs_heldout.
    splits: Training and test split of --datasets; by default train, and test or else validation.
    names: Names of the runs: METHOD or METHOD/SETTING; for files also RUN:DATASET.
    results: A --json file of an earlier call, shown in the same tables; repeatable.
    protocol: A named combination of the following three.
    classifier: By default from the protocol.
    draw: By default from the protocol.
    l2: A number or loo, heldout, mean_rank, mean_rank_others; by default from the protocol.
    shots: Examples per class; 'all' takes every one.
    seeds: One subset is drawn for each.
    layer: The checkpoints' representation.
    batch_size: Global batch of the extraction.
    json: Where all results are written.
    html: Where to write the results as a page with plots.
  """

  aliases: ClassVar = {'dataset': 'datasets', 'split': 'splits'}

  train: Repeated[str] = ()
  test: Repeated[str] = ()
  checkpoint: Repeated[str] = ()
  datasets: tuple[str, ...] | None = None
  splits: tuple[str, ...] | None = None
  names: tuple[str, ...] | None = None
  results: Repeated[str] = ()
  protocol: Annotated[str, OneOf(tuple(fewshot.PROTOCOLS))] = 'loo'
  classifier: Annotated[str, OneOf(fewshot.CLASSIFIERS)] | None = None
  draw: Annotated[str, OneOf(fewshot.DRAWS)] | None = None
  l2: Annotated[float | str, OneOf(fewshot.L2_RULES)] | None = None
  shots: tuple[Count | Literal['all'], ...] = (1, 5, 10, 25)
  seeds: tuple[int, ...] = (0, 1, 2)
  layer: str = 'pre_logits'
  batch_size: Count = 256
  json: str | None = None
  html: str | None = None

  def __post_init__(self):
    num_train = len(self.train)
    num_test = len(self.test)
    if num_train != num_test:
      raise ValueError(
        f'--train is given {num_train} times and --test {num_test} times; each run needs both'
      )
    if self.train and self.checkpoint:
      raise ValueError(
        '--train and --checkpoint cannot go together: represent the checkpoints first'
      )
    if not (self.train or self.checkpoint or self.results):
      raise ValueError('--train and --test, --checkpoint, or --results are needed')
    of_checkpoints = (*_OF_CHECKPOINTS, 'gin_file', 'gin_bindings')
    if not self.checkpoint and (given := [x for x in of_checkpoints if x in self.given]):
      raise ValueError(f'--{given[0]} is for --checkpoint, whose representations are computed here')
    if not (self.train or self.checkpoint):
      self.refuse(_OF_FITS, '--results alone, which are shown as they are')
    if self.splits is not None and len(self.splits) != 2:
      raise ValueError(f'--splits={",".join(self.splits)} must be a training and a test split')

  @property
  def fits(self) -> dict[str, Any]:
    """Protocol, shots and seeds."""
    parts = {name: x for name, x in self.chosen('classifier', 'draw', 'l2').items() if x}
    protocol = dataclasses.replace(fewshot.PROTOCOLS[self.protocol], **parts)
    return {'protocol': protocol, **self.chosen('shots', 'seeds')}


def run(settings: Settings) -> reporting.Report:
  """Accuracies of all runs, and their differences."""
  settings.join()
  earlier = report.read_results(settings.results)
  protocol = {'name': settings.protocol, **dataclasses.asdict(settings.fits['protocol'])}
  if settings.checkpoint:
    of_checkpoints = settings.chosen(*_OF_CHECKPOINTS)
    results = report.from_checkpoints(
      settings.names, settings.checkpoint, settings.gin, **of_checkpoints, **settings.fits
    )
  else:
    results = report.from_files(settings.names, settings.train, settings.test, **settings.fits)
  return report.make_report(protocol, earlier, results)
