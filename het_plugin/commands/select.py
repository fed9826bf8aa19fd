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

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from het_plugin import evaluation, measures, reporting, runs
from het_plugin import rows as rows_lib
from het_plugin.cli.settings import Gin, Repeated, ResultFiles
from het_plugin.measures import fewshot, greedy_ensemble
from het_plugin.measures import knn as neighbors
from het_plugin.measures.ranking import best_first, rank_agreement
from het_plugin.system.ranges import NOT_EMPTY, Count, Positive, Seeds

_MEMBERS = ('max_members', 'replacement')
_PROXIES = ('train', 'test', 'k', 'metric', 'max_examples')
# {measure: the flags that it reads}
_READ = {
  'knn': _PROXIES,
  'rank': (*_PROXIES, 'keep', 'shots', 'seeds', 'l2'),
  'ensemble': ('validation', 'test', *_MEMBERS),
}
_RANKME = (
  'and RankMe, the effective rank of the representations (Garrido et al. 2023, eq. 1), from 1 to '
  'the smaller of D and the number of examples'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Gin, ResultFiles):
  """How candidates are compared, and members of an ensemble chosen.

  Attributes:
    names: Names of the candidates. Default: the parts in which their paths differ.
    k: Numbers of neighbours; the first one ranks.
    metric: Distance of neighbours.
    keep: Number of candidates to evaluate, or 'all'.
    max_members: Largest number of members, repetitions included.
    replacement: Whether a member may be added again.
    png: Where to write the plot.
  """

  names: tuple[str, ...] | None = None
  k: Annotated[tuple[Count, ...], NOT_EMPTY] = (1,)
  metric: neighbors.Metric = 'euclidean'
  keep: str = '1'
  max_members: Count = 10
  replacement: bool = True
  png: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Choice):
  """What is compared, and how.

  Attributes:
    train: Representations of the training split.
    validation: Predictions for the validation split.
    test: The same files of the test split, in the same order.
    shots: Examples per class.
    seeds: Seeds of few-shot subsets, one each.
    l2: Few-shot regularisation: 'loo', 'heldout' or a strength.
    max_examples: Most examples of RankMe, chosen at random.
  """

  takes_words: ClassVar[bool] = True

  train: Repeated[str] = ()
  validation: Repeated[str] = ()
  test: Repeated[str] = ()
  shots: tuple[Count, ...] = (1, 5, 10, 25)
  seeds: Seeds = (0, 1, 2)
  l2: Positive | Literal['loo', 'heldout'] = 'loo'
  max_examples: Count = measures.rankme.MAX_EXAMPLES


def knn(settings: Settings) -> reporting.Report:
  """k-nearest-neighbour accuracy of every candidate, on test files or leaving one out; RankMe."""
  train, test, k = settings.train, settings.test, settings.k
  names = evaluation.candidates.candidate_names(settings.names, train, test)
  classes = evaluation.candidates.check_representations(train, test)
  sources = zip(train, test, strict=True) if test else zip(train)
  both = zip(names, sources, strict=True)
  rows = [_measured(name, of_name, classes, settings) for name, of_name in both]
  rows.sort(key=lambda row: -row['accuracy'][k[0]])
  lines = {row['candidate']: (k, [row['accuracy'][n] for n in k]) for row in rows}
  measured = 'the test examples' if test else 'the training examples, each left out in turn'
  return reporting.Report(
    row_title='candidate',
    title='k-nearest-neighbour accuracy',
    introduction=f'Accuracy of the vote of the k nearest training examples ({settings.metric} '
    f'distance) on {measured}, {_RANKME}.',
    rows=[_columns(row) for row in rows],
    draw=lambda: _figure(
      reporting.lines_png(
        lines, xlabel='neighbours k', ylabel='accuracy', log_x=True, whole_steps=True
      ),
      'Accuracy against the number of neighbours.',
    ),
    json={'metric': settings.metric, 'leave_one_out': not test, 'rows': rows},
  )


def rank(settings: Settings) -> reporting.Report:
  """The proxies of every candidate, and few-shot accuracy of the `keep` best by the first k."""
  train, test, k = settings.train, settings.test, settings.k
  shots = settings.shots
  fewshot.check_settings(shots, settings.seeds, settings.l2)
  names = evaluation.candidates.candidate_names(settings.names, train, test)
  if not test:
    raise ValueError('--test is not set; rank measures few-shot accuracy on test files')
  num_kept = evaluation.candidates.number_to_keep(settings.keep, names)
  classes = evaluation.candidates.check_representations(train, test)

  both = zip(names, train, strict=True)
  rows = [_measured(name, [source], classes, settings) for name, source in both]
  order = best_first([row['accuracy'][k[0]] for row in rows])
  for i in order[:num_kept]:
    fit, new = _halves((train[i], test[i]), classes)
    given = settings.chosen('shots', 'seeds', 'l2')
    found = fewshot.few_shot(fit.x, fit.y, new.x, new.y, train_index=fit.index, **given)
    rows[i]['few_shot'] = found
  rows = [rows[i] for i in order]
  kept = rows[:num_kept]
  proxy = [row['accuracy'][k[0]] for row in kept]
  points = {n: (proxy, [row['few_shot'][n].mean for row in kept]) for n in shots}
  agreements = {}
  notes = []
  if len(kept) < len(names):
    notes = [
      f'few-shot accuracy of the best {len(kept)} of {len(names)}; --keep=all measures the proxy'
    ]
  elif len(names) > 1:
    agreements = {n: rank_agreement(*xy) for n, xy in points.items()}
  notes += [
    f"{reporting.counted(n, 'shot')}: Kendall's tau "
    + ('undefined' if found['kendall_tau'] is None else f'{found["kendall_tau"]:.3f}')
    + f'; regret of keeping the best 1, 2, ...: {", ".join(f"{x:.3f}" for x in found["regret"])}'
    for n, found in agreements.items()
  ]
  return reporting.Report(
    row_title='candidate',
    title='Candidates for a task',
    introduction=f'Leave-one-out accuracy of the k nearest training examples ({settings.metric} '
    f'distance) and few-shot accuracy on the test examples of the best {len(kept)}, {_RANKME}.',
    rows=[_columns(row) for row in rows],
    notes=notes,
    draw=lambda: _figure(
      reporting.scatter_png(
        {reporting.counted(n, 'shot'): xy for n, xy in points.items()},
        [row['candidate'] for row in kept],
        xlabel=f'kNN accuracy, k = {k[0]}, leave-one-out',
        ylabel='few-shot accuracy',
      ),
      'Few-shot accuracy against the proxy.',
    ),
    json={
      'metric': settings.metric,
      'rows': [
        row | {'few_shot': {n: x.record() for n, x in row.get('few_shot', {}).items()}}
        for row in rows
      ],
      'agreement': agreements,
    },
  )


def ensemble(settings: Settings) -> reporting.Report:
  """A greedy ensemble beside the best single candidate and the average of all."""
  validation, test = settings.validation, settings.test
  names = evaluation.candidates.candidate_names(settings.names, validation, test, flag='validation')
  # The test files are also read now, so that a wrong one is found before anything is computed.
  for pair in zip(validation, test, strict=False):
    runs.sources.different(pair, 'validation')
  labels = []
  meanings = []
  for read in evaluation.candidates.same_predictions(validation, 'validation'):
    labels.append(read.label_log_prob)
    meanings.append(read.meaning)
  for i, of_test in enumerate(evaluation.candidates.same_predictions(test, 'test')):
    rows_lib.paired((validation[i], test[i]), meanings[i], of_test)

  members, path = greedy_ensemble.greedy_ensemble(np.stack(labels), **settings.chosen(*_MEMBERS))
  shares = np.bincount(members, minlength=len(names)) / len(members)
  best = members[0]  # the first step finds the best single candidate
  ensembles = {
    'greedy ensemble': shares,
    f'best single: {names[best]}': np.eye(len(names))[best],
    'average of all': np.full(len(names), 1 / len(names)),
  }
  rows: list[dict[str, Any]] = [
    {'ensemble': name, 'num_members': int((weights > 0).sum())}
    for name, weights in ensembles.items()
  ]
  splits = {'validation': validation} | ({'test': test} if test else {})
  for split, sources in splits.items():
    scores = _mixture_scores(sources, split, np.stack(list(ensembles.values())))
    for row, (nll, accuracy) in zip(rows, scores, strict=True):
      row |= {f'{split}_nll': nll, f'{split}_accuracy': accuracy}
  chosen = sorted(set(members), key=lambda i: -shares[i])
  steps = [
    {'candidate': names[member], 'validation_nll': nll}
    for member, nll in zip(members, path, strict=True)
  ]
  return reporting.Report(
    row_title='candidate',
    title='Greedy ensemble',
    introduction=f'Members out of {reporting.counted(len(names), "candidate")}, added one by one '
    f'for the smallest validation NLL {"with" if settings.replacement else "without"} replacement; '
    'an ensemble predicts the average of probabilities.',
    rows=[
      {'name': row['ensemble'], 'members': row['num_members']}
      | {
        f'{split} {title}': f'{row[f"{split}_{name}"]:.4f}'
        for split in splits
        for title, name in (('NLL', 'nll'), ('accuracy', 'accuracy'))
      }
      for row in rows
    ],
    notes=['members: ' + ', '.join(f'{names[i]} {shares[i]:.3g}' for i in chosen)]
    + [
      f'{i}. {step["candidate"]}: validation NLL {step["validation_nll"]:.4f}'
      for i, step in enumerate(steps, 1)
    ],
    draw=lambda: _figure(
      reporting.lines_png(
        {'validation NLL': (range(1, len(path) + 1), path)},
        xlabel='members',
        ylabel='validation NLL',
        whole_steps=True,
      ),
      'Validation NLL by number of members.',
    ),
    json={
      'rows': rows,
      'members': [{'candidate': names[i], 'weight': shares[i]} for i in chosen],
      'steps': steps,
    },
  )


MEASURES = {'knn': knn, 'rank': rank, 'ensemble': ensemble}


def run(settings: Settings) -> reporting.Report:
  """The candidates, the best one first, or an ensemble of them."""
  words = settings.words
  if len(words) != 1 or words[0] not in MEASURES:
    raise ValueError(
      f'{" ".join(["select", *words])}: write one of {", ".join(MEASURES)}; soup and finetune are '
      'commands of their own'
    )
  (measure,) = words
  for flag in sorted({*settings.given}.difference(_READ[measure])):
    if readers := ', '.join(name for name, flags in _READ.items() if flag in flags):
      raise ValueError(f'--{flag} has no effect on {measure}: {readers} read it')
  settings.refuse(['gin_file', 'gin_bindings'], f'{measure}, which reads files only')
  sources = settings.chosen('train', 'validation', 'test').items()
  split = {name: evaluation.candidates.split_sources(texts) for name, texts in sources}
  return MEASURES[measure](dataclasses.replace(settings, **split))


def _figure(png: bytes, caption: str) -> dict[str, reporting.Figure]:
  return {'plot': reporting.Figure(png, caption)}


def _halves(texts: Sequence[str], classes: Sequence[str] | None) -> list[fewshot.Split]:
  """A training split, and a test split if there is one."""
  halves = [half.in_order(classes) for half in runs.sources.read_pair(texts)]
  return list(map(evaluation.fewshot.split_of, halves, texts))


def _measured(
  name: str, sources: Sequence[str], classes: Sequence[str] | None, settings: Settings
) -> dict[str, Any]:
  """The row of a candidate in the JSON, from (train, test), or leaving one out from (train,)."""
  arrays = [x for half in _halves(sources, classes) for x in (half.x, half.y)]
  sigma = measures.rankme.singular_values(arrays[0], settings.max_examples)
  return {
    'candidate': name,
    'pre_logits_dim': arrays[0].shape[1],
    'accuracy': neighbors.knn_accuracy(*arrays, ks=settings.k, metric=settings.metric),
    'rankme': measures.rankme.rankme(sigma),
  }


def _columns(row: dict[str, Any]) -> dict[str, Any]:
  """The row of a candidate in the table."""
  few_shot = row.get('few_shot', {})
  return {
    'name': row['candidate'],
    'pre_logits_dim': row['pre_logits_dim'],
    **{f'k = {n}': f'{accuracy:.4f}' for n, accuracy in row['accuracy'].items()},
    'RankMe': row['rankme'],
    'fewshot': {'': {n: result.mean for n, result in few_shot.items()}},
    'fewshot_stderr': {'': {n: result.stderr for n, result in few_shot.items()}},
  }


def _mixture_scores(
  sources: Sequence[str], split: str, weights: np.ndarray
) -> list[tuple[float, float]]:
  """(NLL, accuracy) of mixtures of the candidates with weights [E, C]."""
  labels = evaluation.candidates.read_softmax_predictions(sources[0], split).labels
  read = evaluation.candidates.same_predictions(sources, split)
  log_probs = greedy_ensemble.mixture_log_prob((x.log_prob for x in read), weights)
  np.minimum(log_probs, 0.0, out=log_probs)  # sums may round to above 1
  scored = (measures.uncertainty.score_examples(x, labels, ks=(1,)) for x in log_probs)
  return [(float(x.nll.mean()), float(x.precision[1].mean())) for x in scored]
