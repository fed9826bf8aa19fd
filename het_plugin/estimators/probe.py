"""Heads compared on saved representations: a grid, folds, errors, and paired differences."""

import dataclasses
import datetime
import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold, train_test_split

from het_plugin import reporting
from het_plugin.estimators import inputs
from het_plugin.estimators.classifier import HeadClassifier
from het_plugin.estimators.classifiers import CLASSIFIERS
from het_plugin.estimators.model import is_noise
from het_plugin.estimators.selection import NOISE_SHARE, least_noise
from het_plugin.evaluation.uncertainty_report import calibration_figures
from het_plugin.measures import agreement, uncertainty, votes
from het_plugin.measures.comparison import EXTREME, extreme_share
from het_plugin.rows import Rows, check_pair, concatenate, label_rows
from het_plugin.rows import read as read_rows
from het_plugin.rows.labels import are_marks

_COMPARED = ('nll', 'brier', 'precision_at_1')


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of a comparison.

  Attributes:
    heads: names in `CLASSIFIERS`.
    c, c_noise, num_factors, tau: the grid, from which `choose` takes a point by the NLL of held-out
      rows. If there are several values of c_noise, 0 (no noise) is one of them. 'auto', alone, is
      no grid: every fit chooses on rows of its own (`HetClassifier`).
    hidden_layers: widths of GELU layers below every head.
    baseline: the head that others are compared with.
    folds: number of folds of the training rows, used if there is no test file.
    validation: share of the training rows held out to choose from a grid of more than one point.
    target: 'votes' if the labels of an example are those of several annotators; 'auto' takes
      several labels for an indicator. Labels with weights are shares in either case.
    solver, mesh: settings of the estimators.
    num_samples, tol, max_iter: settings of the estimators.
    seed: seed of splits and starts.
    progress: whether each fit longer than two seconds shows how far it is: a bar on a terminal,
      elsewhere a line every ten seconds.
  """

  heads: Sequence[str] = ('det', 'het_xl')
  c: Sequence[float] = (1.0,)
  c_noise: Sequence[float | str | None] = ('auto',)
  num_factors: Sequence[int] = (8,)
  tau: Sequence[float | str] = (1.0,)
  hidden_layers: Sequence[int] = ()
  baseline: str | None = None
  folds: int = 5
  validation: float = 0.1
  num_samples: int = 64
  tol: float = 1e-4
  max_iter: int = 500
  seed: int = 0
  target: str = 'auto'
  solver: str = 'auto'
  mesh: Sequence[int] | None = None
  progress: bool = True

  def __post_init__(self):
    lists = {'heads': self.heads, 'C': self.c, 'C_noise': self.c_noise, 'tau': self.tau}
    lists |= {'num_factors': self.num_factors}
    for flag, values in lists.items():
      if values is None or isinstance(values, (str, int, float)):
        raise ValueError(f'{flag}={values!r} must be a list: [{values!r}]')
      if not values:
        raise ValueError(f'--{flag}= has no value; it must list at least one')
    if 'auto' in self.c_noise and len(self.c_noise) > 1:
      raise ValueError(
        f'--C_noise={",".join(map(str, self.c_noise))}: auto chooses from values of its own, and '
        'must be the only one'
      )
    if unknown := [name for name in self.heads if name not in CLASSIFIERS]:
      raise ValueError(
        f'--heads={",".join(self.heads)}: {unknown[0]} is unknown; choose from '
        f'{", ".join(CLASSIFIERS)}'
      )
    if self.baseline is not None and self.baseline not in self.heads:
      raise ValueError(f'--baseline={self.baseline} must be one of --heads={",".join(self.heads)}')
    if self.target not in ('auto', 'votes', 'probabilities'):
      raise ValueError(f"--target={self.target} must be 'auto' or 'votes'")
    if self.folds < 2:
      raise ValueError(f'--folds={self.folds} must be at least 2')
    if not 0 < self.validation < 1:
      raise ValueError(f'--validation={self.validation} must be a share in (0, 1)')
    if not self.tol > 0:
      raise ValueError(f'--tol={self.tol} must be a number > 0')

  def grid(self, head: str) -> list[dict[str, Any]]:
    """Settings of the estimator at each point of the grid."""
    points = [{'C': c, 'tau': tau} for c, tau in itertools.product(self.c, self.tau)]
    if head == 'det':
      return points
    c_noise = self.c_noise
    if len(c_noise) > 1 and 0.0 not in c_noise:
      c_noise = (0.0, *c_noise)
    return [
      {**point, 'C_noise': c, 'num_factors': r, 'num_samples': self.num_samples}
      for point, c, r in itertools.product(points, c_noise, self.num_factors)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
  """One head: scores and folds of all test examples, the settings chosen in each fold, and the
  price of its noise.
  """

  head: str
  scores: uncertainty.ExampleScores
  fold: np.ndarray
  chosen: Sequence[dict[str, Any]]
  seconds: float
  unfinished: int
  left_out: int
  agreement: dict[str, float]
  price: float


FileOrArrays = str | tuple[np.ndarray, np.ndarray] | Rows


def probe(
  train: FileOrArrays,
  test: FileOrArrays | None,
  settings: Settings,
  ood: FileOrArrays | None = None,
) -> reporting.Report:
  """Fits the heads to representations.

      >>> from sklearn.datasets import load_iris
      >>> settings = Settings(heads=['det'], c=[0.1, 1.0], folds=2, progress=False)
      >>> report = probe(load_iris(return_X_y=True), None, settings)
      >>> (row,) = report.json
      >>> row['num_examples'], len(row['chosen'])
      (150, 2)

  Args:
    train: a file (`rows.read`), or features [N, D], which may be a memory map, and class ids [N];
      or `Rows`; or without `test` a folder of `represent`, whose files train and test are taken.
    test: a file or arrays for the test rows; None uses folds of `train`.
    settings: settings of the comparison.
    ood: rows of another distribution, whose confidence is compared with that of the test rows.

  Returns:
    The report, with a row for each head. Its NLL is in nats per example.

  Raises:
    ValueError: a file or a setting is wrong.
  """
  if test is None and isinstance(train, str) and Path(train).is_dir():
    train, test = files_of(Path(train))
  train_rows, train = read(train, 'the training rows')
  test_rows, test = (None, None) if test is None else read(test, 'the test rows')
  if test_rows is not None and test is not None:
    check_pair((train, test), (train_rows.meaning, test_rows.meaning))
  elif len(train_rows.features) < settings.folds:
    raise ValueError(
      f'--folds={settings.folds} must be at most {len(train_rows.features)}, the rows of {train}'
    )
  ood_rows = None if ood is None else read(ood, 'the rows of another distribution')[0].features
  if ood_rows is not None and ood_rows.shape[1] != train_rows.features.shape[1]:
    raise ValueError(
      f'--ood has {ood_rows.shape[1]} features and {train} has {train_rows.features.shape[1]}; '
      'they must be equal'
    )
  y, classes, target = targets_of(train_rows, settings.target)
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
  titles = fit_titles(settings, settings.folds if test is None else 1)
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
    f'{x.head}: {x.unfinished} of its fits have not converged; raise --max_iter.'
    for x in outcomes
    if x.unfinished
  ]
  if first.left_out:
    notes.append(f'Rows left out, because no other fold has their class: {first.left_out}.')
  notes += [note for x in outcomes for note in _ends_of_the_grid(x, settings)]
  return reporting.Report(
    title='Heads on saved representations',
    introduction=f'{len(first.scores.index):,} examples of {where}; heads fitted to '
    f'{num_fitted:,} rows of {train_rows.features.shape[1]} features.',
    rows=[_shown(row) for row in rows],
    row_title='head',
    notes=notes,
    draw=lambda: calibration_figures({x.head: x.scores for x in outcomes}),
    json=rows,
  )


def files_of(folder: Path) -> tuple[str, str | None]:
  """The files train and test, or else validation, in a folder, or its only file."""
  files = [*folder.rglob('[!.]*.safetensors'), *folder.rglob('[!.]*.npz')]
  files = sorted(x for x in files if not x.parent.name.startswith('.'))  # of an unfinished split
  if len(files) == 1:
    return str(files[0]), None
  usual = 'train', 'test', 'validation'
  train, test, validation = ([str(x) for x in files if x.stem == split] for split in usual)
  if len(train) == len(test or validation) == 1:
    return train[0], (test or validation)[0]
  raise ValueError(
    f'--train={folder} must have one .safetensors or .npz file, or one named train and one named '
    f'test or validation; it has {", ".join(map(str, files)) or "none"}: name a file, and another '
    'as --test'
  )


def read(source: FileOrArrays, name: str) -> tuple[Rows, str]:
  """Rows with features, and their name."""
  if isinstance(source, Rows):
    return source, source.provenance.get('source', name)
  if isinstance(source, str):
    return read_rows(source, mapped=True), source
  x = np.asanyarray(source[0])
  y = np.asarray(source[1])  # keeps a memory map
  return Rows({'features': x}, label_rows(y, len(x)), np.arange(len(x))), name


def targets_of(rows: Rows, target: str) -> tuple[np.ndarray, np.ndarray, str]:
  """y of the fits, its classes, and which `target` it is: ids [N]; with several labels an example
  votes [N, L], an indicator [N, K], or, where they have weights, shares of the classes [N, K].

  Raises:
    ValueError: an example has not one label, or labels are those of `labels.are_marks`.
  """
  labels = rows.labels
  num_classes = rows.num_classes
  if votes.has_shares(labels, rows.label_weight):
    shares = votes.shares(labels, num_classes, rows.label_weight)
    return shares, np.arange(num_classes), 'probabilities'
  if target == 'votes' or labels.shape[1] == 1:
    y = labels if target == 'votes' else rows.label
    return y, np.unique(labels[labels >= 0]), target
  if are_marks(labels, labels.shape[1]):
    raise ValueError(
      f'labels are {list(labels.shape)} of 0 and 1: classes that are marked must be their numbers, '
      'padded with -1; for votes set --target=votes'
    )
  return votes.indicator(labels, num_classes).astype(int), np.arange(num_classes), target


def _columns(labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """The numbers of labels [N, L] among the sorted classes, -1 where there is none.

  Raises:
    ValueError: a label is none of the classes.
  """
  found = np.minimum(np.searchsorted(classes, labels), len(classes) - 1)
  unseen = (classes[found] != labels) & (labels >= 0)
  if unseen.any():
    raise ValueError(
      f'{int(unseen.any(axis=1).sum())} test rows have classes that do not occur in the training '
      f'rows, such as {int(labels[unseen][0])}'
    )
  return np.where(labels >= 0, found, -1)


def fit_titles(settings: Settings, num_folds: int) -> Iterator[str]:
  """What is shown during each fit, in the order in which they are made."""
  num_fits = {head: len(grid := settings.grid(head)) + (len(grid) > 1) for head in settings.heads}
  total = num_folds * sum(num_fits.values())
  done = 0
  start = time.monotonic()
  for count in num_fits.values():
    for fold, _ in itertools.product(range(num_folds), range(count)):
      of_fold = f', fold {fold + 1} of {num_folds}' if num_folds > 1 else ''
      left = ''
      if done:
        seconds = (time.monotonic() - start) / done * (total - done)
        left = f' (all: ETA {datetime.timedelta(seconds=round(seconds))})'
      done += 1
      yield f'fit {done} of {total}{of_fold}{left}'


def _outcome(head, train, y, test, ood, settings, starts, titles) -> Outcome:
  start = time.perf_counter()
  if test is not None:
    splits = [(np.arange(len(y)), np.arange(len(test)))]
  else:
    splits = list(KFold(settings.folds, shuffle=True, random_state=settings.seed).split(y))
  parts = []
  folds = []
  chosen = []
  unfinished = 0
  left_out = 0
  agreements = []
  for number, (fitted, known) in enumerate(splits):
    if test is None and (settings.target == 'votes' or y.ndim == 1):  # others have no probability
      seen = _are_known(train.labels[known], train.labels[fitted])
      left_out = left_out + int((~seen).sum())
      known = known[seen]
      if not len(known):  # nothing to score
        continue
    of_fold = train.features, y, fitted, settings, starts, titles
    estimator, point, failures = fit_best(head, *of_fold)
    rows = train if test is None else test
    of_parts = inputs.parts(known, rows.features)
    predictions = concatenate([_predictions(estimator, rows.take(part)) for part in of_parts])
    parts.append(uncertainty.score_examples(**predictions.labelled, ks=(1,)))
    if predictions.link == 'softmax':
      ood_log_p = None if ood is None else estimator.predict_log_proba(ood)
      of_people = predictions.log_prob, predictions.labels, predictions.label_weight
      people = agreement.score_examples(*of_people)
      agreements.append(agreement.summarize(people, ood_log_p))
    folds.append(np.full(len(known), number))
    chosen.append(point)
    unfinished += failures
  seconds = time.perf_counter() - start
  return Outcome(
    head,
    uncertainty.concatenate(parts),
    np.concatenate(folds),
    chosen,
    seconds,
    unfinished,
    left_out,
    {name: float(np.mean([x[name] for x in agreements])) for name in (agreements or [{}])[0]},
    price(num_noise_params(estimator), len(fitted)),
  )


def _are_known(labels, seen):
  """Whether all labels of each row [N, L] are among those that a fit has seen."""
  return ((labels < 0) | np.isin(labels, seen)).all(axis=1)


def _ends_of_the_grid(outcome, settings):
  """A note for each setting whose largest or smallest value was chosen by a fold."""
  for name, values in (('C', settings.c), ('C_noise', settings.c_noise)):
    values = sorted(x for x in values if x)
    chosen = [point.get(name) for point in outcome.chosen]
    if len(values) < 2:
      continue
    for end, beyond in ((values[0], 'smaller'), (values[-1], 'larger')):
      if end in chosen:
        where = f'{name}={end:g} was chosen at the end of --{name}'
        yield f'{outcome.head}: {where}: try {beyond} ones.'


def price(num_params: int, num_rows: int) -> float:
  """Nats per example of new data that fitting parameters to rows costs without regularisation.

  It is p / (2 N), the expected excess of the NLL over that of the best parameters (Akaike 1974,
  https://doi.org/10.1109/TAC.1974.1100705).
  """
  return num_params / (2 * num_rows)


def num_noise_params(estimator: HeadClassifier) -> int:
  """Number of the parameters of the noise of a fitted head; 0 for DET."""
  flat = traverse_util.flatten_dict(estimator.params_)
  return sum(x.size for path, x in flat.items() if is_noise(path))


def fit_best(
  head, x, y, fitted, settings, starts, titles
) -> tuple[HeadClassifier, dict[str, Any], int]:
  """The estimator of the best point of the grid, fitted to all rows.

  `starts` collects the fits of DET, where the noise starts; each fit takes one of `titles`. Also
  returns this point, with the C_noise of the fit, and the number of fits that did not converge.
  """
  grid = settings.grid(head)
  names = ('hidden_layers', 'tol', 'max_iter', 'target', 'solver', 'mesh')
  common = {name: getattr(settings, name) for name in names} | {'random_state': settings.seed}

  def fit(point, rows):
    common['progress'] = settings.progress and next(titles)
    # All rows without a copy where they may be a file: others have no weight.
    if len(rows) == len(x):
      part = x, y
    elif inputs.streams(x, settings.solver):
      part = x, y, np.bincount(rows, minlength=len(x))
    else:
      part = x[rows], y[rows]
    tau = point['tau']
    det = (None, False)
    if head == 'det' or tau != 'validation':
      key = (hash(rows.tobytes()), point['C'], tau)
      if key not in starts:
        starts[key] = _fitted(CLASSIFIERS['det'](C=point['C'], tau=tau, **common), *part)
      det = starts[key]
    if head == 'det':
      return det
    return _fitted(CLASSIFIERS[head](**common, **point), *part, start=det[0])

  best = grid[0]
  failures = 0
  if len(grid) > 1:
    part, held_out = train_test_split(
      fitted, test_size=settings.validation, random_state=settings.seed
    )
    if settings.target == 'votes' or y.ndim == 1:  # as in `_outcome`
      held_out = held_out[_are_known(y[held_out].reshape(len(held_out), -1), y[part])]
    nll = []
    for point in grid:
      estimator, is_unfinished = fit(point, part)
      parts = inputs.parts(held_out, x)
      nll.append(np.concatenate([estimator.nll(x[part], y[part]) for part in parts]))
      failures += is_unfinished
    best = grid[choose(grid, np.stack(nll))]
  estimator, is_unfinished = fit(best, fitted)
  if head != 'det':
    best = {**best, 'C_noise': estimator.C_noise_}
  return estimator, best, failures + is_unfinished


def _fitted(estimator: HeadClassifier, *rows, **start) -> tuple[HeadClassifier, bool]:
  """The estimator after its fit, and whether it warned that it has not converged."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    estimator.fit(*rows, **start)
  of_others = [x for x in caught if not issubclass(x.category, ConvergenceWarning)]
  for x in of_others:
    warnings.warn_explicit(x.message, x.category, x.filename, x.lineno)
  return estimator, len(of_others) < len(caught)


def choose(grid: Sequence[dict[str, Any]], nll: np.ndarray) -> int:
  """The number of the point of a grid to take, by the one-standard-error rule for the noise.

  It is one of the points that differ from the one with the least mean NLL in C_noise only
  (`selection.least_noise`).

  Args:
    grid: settings of estimators.
    nll: [points, N], NLL of held-out rows, nats.

  Returns:
    The number of the point.
  """
  best = grid[int(np.argmin(nll.mean(axis=1)))]
  same = [i for i, x in enumerate(grid) if {**x, 'C_noise': None} == {**best, 'C_noise': None}]
  given = [(grid[i].get('C_noise'), grid[i]['C']) for i in same]
  # 'auto' is alone, and any number.
  c_noise = np.array([NOISE_SHARE * c if x in (None, 'auto') else x for x, c in given])
  return same[least_noise(c_noise, nll[same])]


def _predictions(estimator: HeadClassifier, rows: Rows) -> Rows:
  """What the estimator predicts for the rows, with class numbers as labels."""
  labels = _columns(rows.labels, estimator.classes_).astype(np.int32)
  columns = {'log_prob': np.minimum(estimator.predict_log_proba(rows.features), 0.0)}
  link = 'softmax'
  if estimator.target_ == 'indicator':
    link = 'sigmoid'
    on = votes.indicator(labels, len(estimator.classes_))
    columns['nll'] = estimator.nll(rows.features, on.astype(int))
  weight = rows.label_weight if link == 'softmax' else None
  return Rows(columns, labels, rows.index, weight, link=link)


def _row(outcome: Outcome, first: Outcome, in_folds: bool) -> dict[str, Any]:
  """All results of a head as JSON values."""
  summary = uncertainty.summarize(outcome.scores)
  row: dict[str, Any] = {'head': outcome.head}
  names = ('nll', 'precision_at_1', 'ece', 'brier')
  row |= {name: summary.pop(name) for name in names}
  row |= {'seconds': outcome.seconds, **summary, 'price': outcome.price}
  row['chosen'] = list(outcome.chosen)
  row |= {'agreement': outcome.agreement} if outcome.agreement else {}
  if in_folds:
    row['stderr_folds'] = {
      name: _over_folds(_values(outcome.scores, name), outcome.fold) for name in _COMPARED
    }
  if outcome is not first:
    difference = uncertainty.difference(outcome.scores, first.scores)
    gap = _sorted_by_index(outcome.scores) - _sorted_by_index(first.scores)
    difference['extreme'] = extreme_share(gap)
    if in_folds:
      per_example = _values(outcome.scores, 'nll') - _values(first.scores, 'nll')
      difference['stderr_folds'] = {'nll': _over_folds(per_example, outcome.fold)}
    row['difference'] = difference
  return row


def _sorted_by_index(scores):
  return scores.nll[np.argsort(scores.index)]


def _values(scores, name):
  return scores.precision[1] if name == 'precision_at_1' else getattr(scores, name)


def _over_folds(values, fold) -> float | None:
  """Standard error of the mean over folds."""
  means = np.array([values[fold == f].mean() for f in np.unique(fold)])
  return uncertainty.stderr(means)


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
