"""Fits heads to saved representations, up to convergence, and compares them; trains no backbone.

    python -m het_plugin.probe --train=train.npz --test=test.npz --heads=det,het_xl
    python -m het_plugin.probe --train=representations/digits  # from `represent`: train and test
    python -m het_plugin.probe --train=X.npy,Y.npy --heads=det,het,het_xl --C=0.1,1,10 --folds=5
    python -m het_plugin.probe --checkpoint=runs/det --dataset=digits

Prints NLL, precision@1, ECE and Brier score with standard errors, and differences to the first head
(or --baseline), paired by example. Without --test the rows of --train are scored fold by fold.
--C, --C_noise, --num_factors and --tau may list several values. The NLL on a share (--validation)
of the training rows chooses. For --C_noise, 0 (no noise) is added, and the smallest value within
one standard error of the best is taken. With --C_noise=auto, the default, there is no such grid:
every fit chooses no noise or a share of C by the same rule, on a fifth of its own rows. A list has
a whole fit for each value; auto has short ones, each from the end of the one before.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from het_plugin import estimators, evaluation, measures, reporting, runs
from het_plugin.cli.settings import Processes, ResultFiles
from het_plugin.commands._rows import RowsSettings, TextOrArrays, have_learned, read
from het_plugin.estimators.settings import GridSettings, part
from het_plugin.evaluation.names import naming, task_name
from het_plugin.measures import votes
from het_plugin.measures.comparison import EXTREME, extreme_share
from het_plugin.rows import Reordered, Rows, check_features, paired
from het_plugin.system import exit_codes

_COMPARED = ('nll', 'brier', 'precision_at_1')
_SCORES = 2**26  # log-probabilities that are held together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RowsSettings, GridSettings, ResultFiles, Processes):
  """What is fitted, and to what.

  Attributes:
    test: Rows to score the heads on, as --train.
    ood: Rows of another distribution, for the AUROC, as --train.
    splits: Splits of --dataset to fit to and to score on. Default: train, and test or else
      validation.
  """

  test: str | None = None
  ood: str | None = None
  splits: tuple[str, ...] | None = None


def run(settings: Settings) -> reporting.Report:
  """Scores of the heads, and their differences."""
  settings.check_rows(('train', 'test'), ('dataset', 'splits'))
  if set(settings.heads) <= {'det'}:
    of_noise = 'C_noise', 'num_factors', 'num_samples'
    settings.refuse(of_noise, '--heads=det, which has no noise')
  if settings.test:
    settings.refuse(['folds'], '--test')
  splits = settings.splits or ()
  if len(splits) > 2:
    raise ValueError(f'--splits={",".join(splits)} must be a training and a test split')
  settings.join()
  if exit_codes.is_distributed():
    import jax  # slow: --help needs none

    mesh = settings.mesh or (jax.device_count(), 1)
    estimators.placement.make_mesh(mesh)  # before any row is read
    settings = dataclasses.replace(settings, mesh=mesh)
  train, test = settings.train, settings.test
  if settings.checkpoint:
    with naming(f'--dataset={settings.dataset}'):
      usual = 'train', runs.run.default_split(task_name(settings.dataset or ''))
    train, *others = settings.represented('het_plugin.probe', splits or usual)
    test = others[0] if others else None
  elif train and test:
    runs.sources.different((train, test))
  fits = part(settings, GridSettings)
  return probe(train or '', test or None, fits, settings.ood, settings.unfinished)


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
  """One head: of each fold the scores of its test examples and the chosen settings."""

  head: str
  parts: Sequence[measures.uncertainty.ExampleScores]
  chosen: Sequence[dict[str, Any]]
  seconds: float
  not_converged: int
  left_out: int
  agreement: dict[str, float]
  price: float

  @functools.cached_property
  def scores(self) -> measures.uncertainty.ExampleScores:
    """Scores of all test examples."""
    return measures.uncertainty.concatenate(self.parts)

  def of_folds(self, name: str) -> np.ndarray:
    """The mean of a score in each fold."""
    each = (x.precision[1] if name == 'precision_at_1' else getattr(x, name) for x in self.parts)
    return np.array([values.mean() for values in each])


def probe(
  train: TextOrArrays,
  test: TextOrArrays | None,
  settings: GridSettings,
  ood: TextOrArrays | None = None,
  unfinished: Path | None = None,
) -> reporting.Report:
  """Fits the heads to representations.

      >>> from sklearn.datasets import load_iris
      >>> settings = GridSettings(heads=['det'], C=[0.1, 1.0], folds=2, progress=False)
      >>> report = probe(load_iris(return_X_y=True), None, settings)
      >>> (row,) = report.json
      >>> row['num_examples'], len(row['chosen'])
      (150, 2)

  Args:
    train: what `open_source` takes, or features [N, D], which may be a memory map, and class ids
      [N]; or `Rows`. Without `test`, both files of a folder of `represent` are taken.
    test: the same of the test rows; None uses folds of `train`.
    settings: settings of the comparison.
    ood: rows of another distribution, whose confidence is compared with that of the test rows.
    unfinished: a folder from which stopped fits go on (`resuming.kept`); None keeps nothing.

  Returns:
    The report, with a row for each head. Its NLL is in nats per example.

  Raises:
    ValueError: a file or a setting is wrong.
  """
  if test is None and isinstance(train, str):
    train, test = runs.sources.halves(train)
  train_rows, train = read(train, 'the training rows', 'train')
  test_rows, test = (None, None) if test is None else read(test, 'the test rows')
  if test_rows is not None and test is not None:
    test_rows = paired((train, test), train_rows.meaning, test_rows)
  elif len(train_rows.features) < settings.folds:
    raise ValueError(
      f'--folds={settings.folds} must be at most {len(train_rows.features)}, the rows of {train}'
    )
  ood_rows = None
  if ood is not None:
    found, name = read(ood, 'the rows of another distribution')
    check_features((train, f'--ood={name}'), train_rows.meaning, found.meaning)
    ood_rows = found.features
  y, classes, target = estimators.targets.of_rows(train_rows, settings.target)
  settings = dataclasses.replace(settings, target=target)
  if ood_rows is not None and target == 'auto' and y.ndim == 2:
    raise ValueError(
      f'--ood={ood if isinstance(ood, str) else "rows"} needs one label a row, or --target=votes: '
      f'{train} has several, and each of their classes would have a probability of its own'
    )
  if test_rows is not None:
    _columns(test_rows.labels, classes)
  rows = (train_rows, y, test_rows, ood_rows)
  starts = {}
  titles = estimators.probe.fit_titles(settings, settings.folds if test is None else 1)
  with estimators.resuming.kept(unfinished, settings, train_rows):
    outcomes = [_outcome(head, *rows, settings, starts, titles) for head in settings.heads]
  baseline = settings.baseline or settings.heads[0]
  first = next(x for x in outcomes if x.head == baseline)
  rows = [_row(x, first, test_rows is None) for x in outcomes]
  where = test
  num_fitted = len(train_rows.features)
  if test is None:
    where = f'{settings.folds} folds of {train}'
    num_fitted -= num_fitted // settings.folds
  differences = (
    f'differences to {baseline} are paired by example. extreme: share of the difference in NLL '
    f'that the {EXTREME:.0%} of examples with the largest differences make. Near 1, the other '
    'examples gain nothing.'
  )
  notes = [
    f'± is a standard error over examples{f"; {differences}" if len(rows) > 1 else "."} '
    'ECE: 15 bins of equal width. seconds: the fit of DET, from which the noise starts, counts '
    'once. price: the nats per example that the parameters of the noise cost without '
    'regularisation, p / (2N).',
  ]
  notes += [
    f'{x.head}: {x.not_converged} of its fits have not converged; raise --max_iter.'
    for x in outcomes
    if x.not_converged
  ]
  if first.left_out:
    notes.append(f'Rows left out, because no other fold has their class: {first.left_out}.')
  notes += [note for x in outcomes for note in _ends_of_the_grid(x, settings)]
  if have_learned(train_rows):
    notes.append(
      'The heads are fitted to features of a run that was trained on these labels: on other rows '
      'they do worse. Features of another backbone tell what noise gains.'
    )
  return reporting.Report(
    title='Heads on saved representations',
    introduction=f'{len(first.scores.index):,} examples of {where}; heads fitted to '
    f'{num_fitted:,} rows of {train_rows.features.shape[1]} features.',
    rows=[_shown(row) for row in rows],
    row_title='head',
    notes=notes,
    draw=lambda: evaluation.uncertainty_report.calibration_figures(
      {x.head: x.scores for x in outcomes}
    ),
    json=rows,
    written=functools.partial(estimators.resuming.forget, unfinished),
  )


def _columns(labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """The numbers of labels [N, L] among the sorted classes, -1 where there is none.

  Raises:
    ValueError: a label is none of the classes.
  """
  found = estimators.targets.places(labels, classes)
  unseen = (found < 0) & (labels >= 0)
  if unseen.any():
    raise ValueError(
      f'{int(unseen.any(axis=1).sum())} test rows have classes that do not occur in the training '
      f'rows, such as {int(labels[unseen][0])}'
    )
  return found


def _outcome(head, train, y, test, ood, settings, starts, titles) -> Outcome:
  start = time.perf_counter()
  if test is not None:
    splits = [(np.arange(len(y)), np.arange(len(test)))]
  else:
    from sklearn.model_selection import KFold

    splits = list(KFold(settings.folds, shuffle=True, random_state=settings.seed).split(y))
  parts = []
  chosen = []
  not_converged = 0
  left_out = 0
  agreements = []
  for fitted, known in splits:
    if test is None and (settings.target == 'votes' or y.ndim == 1):  # others have no probability
      seen = estimators.probe.are_known(train.labels[known], train.labels[fitted])
      left_out = left_out + int((~seen).sum())
      known = known[seen]
      if not len(known):  # nothing to score
        continue
    of_fold = train.features, y, fitted, settings, starts, titles
    estimator, point, failures = estimators.probe.fit_best(head, *of_fold)
    rows = train if test is None else test
    blocks = (_predictions(estimator, rows, known[x]) for x in _blocks(len(known), estimator))
    scores, people = evaluation.uncertainty_report.scored(blocks)
    parts.append(scores)
    if people is not None:
      tops = None
      if ood is not None:
        blocks = _blocks(len(ood), estimator)
        tops = [estimator.predict_log_proba(ood[x]).max(axis=1, keepdims=True) for x in blocks]
        tops = np.concatenate(tops)  # [M, 1]
      agreements.append(measures.agreement.summarize(people, tops))
    chosen.append(point)
    not_converged += failures
  seconds = time.perf_counter() - start
  return Outcome(
    head,
    parts,
    chosen,
    seconds,
    not_converged,
    left_out,
    {name: float(np.mean([x[name] for x in agreements])) for name in (agreements or [{}])[0]},
    estimators.probe.price(estimators.probe.num_noise_params(estimator), len(fitted)),
  )


def _blocks(num_rows: int, estimator: estimators.classifier.HeadClassifier) -> Iterator[slice]:
  """Rows whose log-probabilities are held together."""
  size = max(1, _SCORES // len(estimator.classes_))
  return (slice(start, start + size) for start in range(0, num_rows, size))


def _ends_of_the_grid(outcome, settings):
  """A note for each setting whose largest or smallest value was chosen by a fold."""
  for name, values in (('C', settings.C), ('C_noise', settings.C_noise)):
    values = sorted(x for x in values if x)
    chosen = [point.get(name) for point in outcome.chosen]
    if len(values) < 2:
      continue
    for end, beyond in ((values[0], 'smaller'), (values[-1], 'larger')):
      if end in chosen:
        where = f'{name}={end:g} was chosen at the end of --{name}'
        yield f'{outcome.head}: {where}: try {beyond} ones.'


def _predictions(
  estimator: estimators.classifier.HeadClassifier, rows: Rows, which: np.ndarray
) -> Rows:
  """What the estimator predicts for some of the rows, with class numbers as labels."""
  x = Reordered(rows.features, which)
  rows = rows.without('features').take(which)
  labels = _columns(rows.labels, estimator.classes_).astype(np.int32)
  columns = {'log_prob': np.minimum(estimator.predict_log_proba(x), 0.0)}
  link = 'softmax'
  if estimator.target_ == 'indicator':
    link = 'sigmoid'
    on = votes.indicator(labels, len(estimator.classes_))
    columns['nll'] = estimator.nll(x, on.astype(int))
  weight = rows.label_weight if link == 'softmax' else None
  return Rows(columns, labels, rows.index, weight, link=link)


def _row(outcome: Outcome, first: Outcome, in_folds: bool) -> dict[str, Any]:
  """All results of a head as JSON values."""
  stderr = measures.uncertainty.stderr
  summary = measures.uncertainty.summarize(outcome.scores)
  row: dict[str, Any] = {'head': outcome.head}
  names = ('nll', 'precision_at_1', 'ece', 'brier')
  row |= {name: summary.pop(name) for name in names}
  row |= {'seconds': outcome.seconds, **summary, 'price': outcome.price}
  row['chosen'] = list(outcome.chosen)
  row |= {'agreement': outcome.agreement} if outcome.agreement else {}
  if in_folds:
    row['stderr_folds'] = {name: stderr(outcome.of_folds(name)) for name in _COMPARED}
  if outcome is not first:
    difference = measures.uncertainty.difference(outcome.scores, first.scores)
    gap = _sorted_by_index(outcome.scores) - _sorted_by_index(first.scores)
    difference['extreme'] = extreme_share(gap)
    if in_folds:
      difference['stderr_folds'] = {'nll': stderr(outcome.of_folds('nll') - first.of_folds('nll'))}
    row['difference'] = difference
  return row


def _sorted_by_index(scores):
  return scores.nll[np.argsort(scores.index)]


def _shown(row):
  names = ('nll', 'precision_at_1', 'ece', 'brier', 'auroc_errors', 'seconds')
  shown = {name: row[name] for name in names if name in row}

  def chosen(name, spec):  # by the folds
    return ', '.join(dict.fromkeys(format(point[name], spec) for point in row['chosen']))

  shown |= {'C': chosen('C', 'g')}
  if 'C_noise' in row['chosen'][0]:
    shown['C_noise'] = chosen('C_noise', 'g')
  shown |= {'chosen tau': chosen('tau', ''), 'price': f'{row["price"]:.3g}'}
  tables = {}
  if 'stderr_folds' in row:
    tables['± over folds'] = row['stderr_folds']
  if {'disagreement_correlation', 'ood_auroc'} & set(row.get('agreement', ())):
    tables['agreement with labels'] = row['agreement']
  if 'difference' in row:
    tables['difference'] = {k: v for k, v in row['difference'].items() if k != 'stderr_folds'}
  errors = {name: row['stderr'].get(name) for name in ('nll', 'precision_at_1', 'brier')}
  return {'name': row['head'], **shown, 'stderr': errors, 'tables': tables}
