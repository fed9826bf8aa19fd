"""Which labels of saved representations are wrong: out of fold, by the location of a head.

A head that is fitted to the labels predicts labels, with their errors. So the audit goes in rounds
of expectation-maximisation. The first fits the head to the labels, and finds the confusions T
(`measures.truths`). The next ones fit it to the posterior q of the truth under T, and find T anew.
This would maximise the likelihood of the labels, sum_k p_k(x) T_ky, in the head and T together. But
p and T are not told apart by it: p may also predict the labels, with T the identity. So q is
sharpened towards its largest class, on the way to classification EM (Celeux and Govaert 1992,
https://doi.org/10.1016/0167-9473(92)90042-E), as if the truth were almost a function of x. The
likelihood of labels that no fit has seen says when to stop.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold

from het_plugin import rows as rows_lib
from het_plugin.estimators import inputs, probe, starts, targets
from het_plugin.estimators.classifier import HeadClassifier
from het_plugin.estimators.settings import DET_TOL, ROUNDS, GridSettings
from het_plugin.measures import audit as measure
from het_plugin.measures import truths
from het_plugin.system import ranges, run_files, temporary
from het_plugin.system.ranges import Count

SETTINGS = GridSettings(('det',), tol=DET_TOL)  # those of the command
_GAIN = 0.002  # nats per label; less in `_PATIENCE` rounds ends the audit
_PATIENCE = 2
# Until a round gains less than this, the labels of the next one are not worth a converged fit. With
# 20,000 rows of 100 classes this left out half of the evaluations, and ranks correlated by 0.9997.
_ROUGH_GAIN = 0.05
_ROUGH_TOL = 1e-2
_SHARPNESS = 2  # the power of q; 1 is expectation-maximisation, and classification EM is infinity
_TINY = np.finfo(np.float64).tiny  # a label that p and T exclude says nothing
_FITTED = 8  # classes of a row whose posteriors are fitted
_PART_BYTES = 2**27  # of probabilities that are predicted at a time
_END = b'het_plugin\n'
_PART_ROWS = 8192


@ranges.checked
def audit(
  features: np.ndarray,
  label: np.ndarray,
  settings: GridSettings | None = None,
  rounds: Count = ROUNDS,
  pred_probs: str | None = None,
) -> measure.Audit:
  """Audits labels by fits to the other folds, so that no label scores itself.

  From the second round on, it has a part in what is found for the rows of these folds.

      >>> import numpy as np
      >>> from het_plugin.estimators.settings import GridSettings
      >>> rng = np.random.default_rng(0)
      >>> x = rng.normal(size=(600, 4))
      >>> truth = x[:, :3].argmax(axis=1)
      >>> label = np.where(rng.random(600) < 0.2, (truth + 1) % 3, truth)
      >>> settings = GridSettings(('det',), C=(10.0,), folds=2, max_iter=50, progress=False)
      >>> found = audit(x, label, settings)
      >>> bool((found.wrong[label != truth].mean() > 3 * found.wrong[label == truth].mean()))
      True

  Args:
    features: float [N, D]; a memory map stays on disk.
    label: int or text [N]. Each class has at least `settings.folds` rows.
    settings: one head, by default `SETTINGS`, the folds, and its grid, from which held-out labels
      choose (`probe.choose`) in the first round.
    rounds: largest number of rounds. 1 fits the head to the labels only.
    pred_probs: where p of the best round is written, a .npy file of float32 [N, K]: what cleanlab
      and others take as out-of-fold probabilities. None does not write it.

  Raises:
    ValueError: there are several heads, too few rows of a class, no round, or label is not one for
      each row.
  """
  settings = SETTINGS if settings is None else settings
  x = features if hasattr(features, 'shape') else np.asarray(features)  # keeps a memory map
  found, failures, _ = in_rounds(x, np.asarray(label), settings, rounds, pred_probs)
  if failures:
    warnings.warn(not_converged(failures, 'max_iter', settings), ConvergenceWarning, stacklevel=2)
  return found


def not_converged(failures: int, setting: str, settings: GridSettings) -> str:
  """A sentence without its full stop on fits that have not converged, and what to raise."""
  return f'Fits that have not converged: {failures}; raise {setting} (now {settings.max_iter})'


def in_rounds(
  features: np.ndarray,
  label: np.ndarray,
  settings: GridSettings,
  rounds: int,
  pred_probs: str | None = None,
  num_classes: int | None = None,
  votes: np.ndarray | None = None,
  annotator: np.ndarray | None = None,
) -> tuple[measure.Audit, int, int]:
  """The audit of the best round, how many of its fits have not converged, and its number.

  With votes, each annotator has confusions of their own: `votes` int [N, L] has all votes of a row,
  and `label` their consensus. `annotator` int [N, L] has who gave each vote. -1 is no vote.
  """
  if len(settings.heads) != 1:
    raise ValueError(f'--head={",".join(settings.heads)} must be one head')
  encoded = targets.encode(inputs.labels_of_rows(len(features), label), 'classes')
  classes = encoded.classes
  y = encoded.values[:, 0].astype(np.int64)
  if len(classes) < 2:
    raise ValueError(f'the labels have {len(classes)} class: an audit needs two or more')
  counts = np.bincount(y).tolist()
  if min(counts) < settings.folds:
    raise ValueError(
      f'class {classes[counts.index(min(counts))]} has {min(counts)} rows: '
      f'--folds={settings.folds} needs at least as many of each class'
    )
  if votes is not None:  # as places among the classes
    votes = targets.places(votes, classes)
  folds = StratifiedKFold(settings.folds, shuffle=True, random_state=settings.seed)
  splits = list(folds.split(np.zeros(len(y)), y))
  of_folds = [settings] * settings.folds
  fitted: list[HeadClassifier | None] = [None] * settings.folds
  of_best = fitted
  truth = truth_of_best = y
  waited = 0
  best: list[tuple[measure.Audit, int, int]] = []  # of one round

  now: truths.Confusions | None = None  # of the last round

  def confusions(estimators: Sequence[Any]) -> truths.Confusions:
    rows = truths.Votes(y, len(classes), votes, annotator, now)
    for part, p in _predicted(features, splits, estimators, len(classes)):
      rows.put(part, p)
    return rows.close().fit()

  # The noise does not start at the round before, and a grid is not chosen from by rough fits.
  is_rough = settings.heads[0] == 'det' and len(settings.grid('det')) == 1 and rounds > 1
  number = 0
  while True:
    number += 1
    tol = max(settings.tol, _ROUGH_TOL) if is_rough else settings.tol
    fitted, of_folds, failures = _fit(features, truth, splits, of_folds, fitted, number, tol)
    now = confusions(fitted)
    found = measure.of_votes(now, error=False)
    gain = best[0][0].nll - found.nll if best else np.inf
    if gain > 0:
      best = [(found, failures, number)]
      of_best = fitted
      truth_of_best = truth
    if is_rough and (gain < _ROUGH_GAIN or number == rounds):  # the best one again, to its end
      is_rough = False
      fitted = of_best
      truth = truth_of_best
      number = best.pop()[2] - 1
      continue
    waited = 0 if gain > _GAIN else waited + 1
    if waited == _PATIENCE or number == rounds:
      break
    truth = targets.Targets('probabilities', np.arange(len(classes)), _sharpened(now))
  found, failures, number = best[0]
  if now is None or of_best is not fitted:
    now = confusions(of_best)
  found = dataclasses.replace(found, share_error=measure.share_error(now, found.wrong))
  if pred_probs:
    parts = _predicted(features, splits, of_best, len(classes))
    _write_probs(pred_probs, parts, len(y), classes, num_classes or len(classes))
  found = dataclasses.replace(found, suggested=classes[found.suggested], ids=classes)
  return found, failures, number


def _sharpened(fitted: truths.Confusions) -> np.ndarray:
  """The sharpened posteriors of `_FITTED` classes of each row, as `Targets.values`, in a file."""
  votes = fitted.votes
  count = min(_FITTED, votes.width)
  values = temporary.array((len(votes), 2, count), np.float32)
  for part in votes.posteriors(fitted.rates):
    of_class = votes.truths(part.rows)
    sharp = np.where(of_class < votes.num_classes, part.q, 0.0) ** _SHARPNESS
    top = np.argpartition(sharp, -count, axis=1)[:, -count:]
    sharp = np.take_along_axis(sharp, top, axis=1)
    sharp /= np.maximum(sharp.sum(axis=1, keepdims=True), _TINY)
    ids = np.minimum(np.take_along_axis(of_class, top, axis=1), votes.num_classes - 1)
    values[part.rows] = np.stack([ids, sharp], axis=1)
  return values


def _predicted(
  features: Any, splits: Sequence[Any], estimators: Sequence[Any], num_classes: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Numbers of rows [b], and their probabilities [b, K] by the fit to the other folds."""
  size = min(_PART_ROWS, max(1, _PART_BYTES // (4 * num_classes)))
  for (_, held_out), estimator in zip(splits, estimators, strict=True):
    for start in range(0, len(held_out), size):
      rows = held_out[start : start + size]
      yield rows, estimator.predict_clean_proba(rows_lib.Reordered(features, rows))


def _write_probs(
  path: str,
  parts: Iterator[tuple[np.ndarray, np.ndarray]],
  num_rows: int,
  classes: np.ndarray,
  num_classes: int,
) -> None:
  """Writes probabilities [N, K] of parts of the rows, with columns for absent classes."""
  columns = classes if num_classes > len(classes) else np.arange(num_classes)
  with run_files.replacing(path) as unfinished:
    written = np.lib.format.open_memmap(unfinished, 'w+', np.float32, (num_rows, num_classes))
    for rows, p in parts:
      wide = np.zeros((len(p), num_classes), np.float32)
      wide[:, columns] = p
      written[rows] = wide
    written.flush()
    with open(unfinished, 'ab') as file:
      file.write(_END)  # NumPy reads up to here, see `reporting.written_here`


def read_probs(path: str, num_rows: int, num_classes: int) -> np.ndarray:
  """Out-of-fold probabilities of a .npy file, float [N, K], mapped.

  Raises:
    ValueError: the file is no such array, or a row has no probabilities that sum to 1.
  """
  with rows_lib.files.reading(path):
    p = np.load(path, mmap_mode='r', allow_pickle=False)
    if p.dtype.kind != 'f' or p.ndim != 2 or len(p) != num_rows or p.shape[1] < num_classes:
      raise ValueError(
        f'it has {p.dtype} {list(p.shape)}; it must be floating point [{num_rows}, K] with K at '
        f'least {num_classes}, a row for each row of --train and a column for each class'
      )
    for start in range(0, num_rows, _PART_ROWS):
      part = np.asarray(p[start : start + _PART_ROWS], np.float64)
      is_wrong = ~((part >= 0).all(axis=1) & (np.abs(part.sum(axis=1) - 1) <= 1e-3))
      if is_wrong.any():
        row = start + int(np.argmax(is_wrong))
        raise ValueError(f'row {row} must be probabilities that sum to 1')
  return p


def _fit(features, truth, splits, of_folds, before, number, tol):
  """Fits to `truth` of the other folds. Fits of DET start at those of the round before.

  Returns the estimator of each fold, the settings that it chose, and the number of fits that have
  not converged.
  """
  titles = probe.fit_titles(of_folds[0], len(of_folds))
  estimators = []
  chosen = []
  failures = 0
  if number > 1:
    titles = (f'round {number}, {title}' for title in titles)
  for (fitted, _), settings, last in zip(splits, of_folds, before, strict=True):
    head = settings.heads[0]
    near = starts.Near(last.params_, {}) if last is not None and head == 'det' else None
    settings = dataclasses.replace(settings, tol=tol)
    of_fold = features, truth, fitted, settings, {}, titles
    estimator, point, count = probe.fit_best(head, *of_fold, near)
    failures += count
    estimators.append(estimator)
    names = ('C', 'C_noise', 'tau', 'num_factors')
    grid = {name: (point[name],) for name in names if name in point}
    chosen.append(dataclasses.replace(settings, **grid))
  return estimators, chosen, failures
