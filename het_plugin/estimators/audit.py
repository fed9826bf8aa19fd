"""Which labels of saved representations are wrong: out of fold, by the location of a head.

A head that is fitted to the labels predicts labels, with their errors. So the audit goes in rounds
of expectation-maximisation. The first fits the head to the labels, and finds the confusions T
(`measures.audit`). The next ones fit it to the posterior q of the truth under T, and find T anew.
This would maximise the likelihood of the labels, sum_k p_k(x) T_ky, in the head and T together. But
p and T are not told apart by it: p may also predict the labels, with T the identity. So q is
sharpened towards its largest class, on the way to classification EM (Celeux and Govaert 1992,
https://doi.org/10.1016/0167-9473(92)90042-E), as if the truth were almost a function of x. The
likelihood of labels that no fit has seen says when to stop.
"""

import csv
import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold

from het_plugin import reporting
from het_plugin import rows as rows_lib
from het_plugin.estimators import inputs, probe, targets
from het_plugin.measures import audit as measure
from het_plugin.system import run_files

if TYPE_CHECKING:  # imports tasks of images, which files do not need
  from het_plugin.evaluation.examples import Examples

SETTINGS = probe.Settings(('det',))  # those of the command
ROUNDS = 10
_GAIN = 0.002  # nats per label; less in `_PATIENCE` rounds ends the audit
_PATIENCE = 2
_SHARPNESS = 2  # the power of q; 1 is expectation-maximisation, and classification EM is infinity
_TINY = np.finfo(np.float64).tiny  # a label that p and T exclude says nothing
_END = b'het_plugin\n'
_PART_ROWS = 8192
_SHOWN = 10
_WORST = 100  # whose truth is counted
_THUMBNAILS = 24
_THUMBNAILS_OF_PAIR = 8


def audit(
  features: np.ndarray,
  label: np.ndarray,
  settings: probe.Settings | None = None,
  rounds: int = ROUNDS,
  pred_probs: str | None = None,
) -> measure.Audit:
  """Audits labels by fits to the other folds, so that no label scores itself.

  From the second round on, it has a part in what is found for the rows of these folds.

      >>> import numpy as np
      >>> from het_plugin.estimators import probe
      >>> rng = np.random.default_rng(0)
      >>> x = rng.normal(size=(600, 4))
      >>> truth = x[:, :3].argmax(axis=1)
      >>> label = np.where(rng.random(600) < 0.2, (truth + 1) % 3, truth)
      >>> settings = probe.Settings(('det',), c=[10.0], folds=2, max_iter=50, progress=False)
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
  x = features if isinstance(features, np.ndarray) else np.asarray(features)  # keeps a memory map
  found, failures, _ = _audit(x, np.asarray(label), settings, rounds, pred_probs)
  if failures:
    warnings.warn(_unfinished(failures, 'max_iter', settings), ConvergenceWarning, stacklevel=2)
  return found


def _unfinished(failures, setting, settings) -> str:
  return f'Fits that have not converged: {failures}; raise {setting} (now {settings.max_iter})'


def _audit(
  features: np.ndarray,
  label: np.ndarray,
  settings: probe.Settings,
  rounds: int,
  pred_probs: str | None = None,
  num_classes: int | None = None,
) -> tuple[measure.Audit, int, int]:
  """The audit of the best round, how many of its fits have not converged, and its number."""
  if len(settings.heads) != 1:
    raise ValueError(f'--head={",".join(settings.heads)} must be one head')
  if rounds < 1:
    raise ValueError(f'--rounds={rounds} must be at least 1')
  encoded = targets.encode(inputs.labels_of_rows(features, label), 'classes')
  classes = encoded.classes
  y = encoded.values[:, 0]
  if len(classes) < 2:
    raise ValueError(f'the labels have {len(classes)} class: an audit needs two or more')
  counts = np.bincount(y).tolist()
  if min(counts) < settings.folds:
    raise ValueError(
      f'class {classes[counts.index(min(counts))]} has {min(counts)} rows: '
      f'--folds={settings.folds} needs at least as many of each class'
    )
  folds = StratifiedKFold(settings.folds, shuffle=True, random_state=settings.seed)
  of_folds = [settings] * settings.folds
  truth = y
  waited = 0
  best: list[tuple[measure.Audit, int, int]] = []  # of one round
  with tempfile.TemporaryFile() as of_p, tempfile.TemporaryFile() as of_q:
    for number in range(1, rounds + 1):
      splits = folds.split(np.zeros(len(y)), y)
      order, of_folds, unfinished = _write(of_p, features, truth, splits, of_folds, number)
      p = np.memmap(of_p, np.float32, 'r', shape=(len(y), len(classes)))
      found = measure.audit(p, y[order])
      gain = best[0][0].nll - found.nll if best else np.inf
      if gain > 0:
        best = [(_in_order(found, order, classes), unfinished, number)]
        if pred_probs:
          _write_probs(pred_probs, p, order, classes, num_classes or len(classes))
      waited = 0 if gain > _GAIN else waited + 1
      if waited == _PATIENCE or number == rounds:
        break
      q = np.memmap(of_q, np.float32, 'w+', shape=p.shape)
      for rows, _, posterior, _ in measure.posteriors(p, y[order], found.confusions):
        sharp = posterior**_SHARPNESS
        q[order[rows]] = sharp / np.maximum(sharp.sum(axis=1, keepdims=True), _TINY)
      truth = targets.Targets('probabilities', np.arange(len(classes)), q)
  return best[0]


def _write_probs(
  path: str, p: np.ndarray, order: np.ndarray, classes: np.ndarray, num_classes: int
) -> None:
  """Writes p [N, K] of the rows in `order` in their own order, with columns for absent classes."""
  columns = classes if num_classes > len(classes) else np.arange(num_classes)
  with run_files.replacing(path) as unfinished:
    written = np.lib.format.open_memmap(unfinished, 'w+', np.float32, (len(p), num_classes))
    for start in range(0, len(p), _PART_ROWS):
      part = slice(start, start + _PART_ROWS)
      rows = np.zeros((len(p[part]), num_classes), np.float32)
      rows[:, columns] = p[part]
      written[order[part]] = rows
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


def _write(file, features, truth, splits, of_folds, number):
  """Writes the probabilities of all rows, fold by fold, by fits to `truth` of the other folds.

  Returns the rows in this order, the settings that each fold chose, and the number of fits that
  have not converged.
  """
  titles = probe.fit_titles(of_folds[0], len(of_folds))
  order = []
  chosen = []
  failures = 0
  if number > 1:
    titles = (f'round {number}, {title}' for title in titles)
  file.seek(0)
  for (fitted, held_out), settings in zip(splits, of_folds, strict=True):
    of_fold = features, truth, fitted, settings, {}, titles
    estimator, point, unfinished = probe.fit_best(settings.heads[0], *of_fold)
    failures += unfinished
    for part in inputs.parts(held_out, features):
      file.write(estimator.predict_clean_proba(features[part]).tobytes())
    order.append(held_out)
    grid = {name: [point[name]] for name in ('tau', 'num_factors') if name in point}
    grid |= {name.lower(): [point[name]] for name in ('C', 'C_noise') if name in point}
    chosen.append(dataclasses.replace(settings, **grid))
  file.flush()
  return np.concatenate(order), chosen, failures


def _in_order(found, order, classes) -> measure.Audit:
  """The audit of rows in another order, which suggests classes by their ids."""
  place = np.argsort(order)
  rows = ('probability', 'confidence', 'wrong', 'suggested', 'kind')
  of_rows = {name: getattr(found, name)[place] for name in rows}
  of_rows['suggested'] = classes[of_rows['suggested']]
  return dataclasses.replace(found, ids=classes, **of_rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Listed(Sequence):
  """The rows of an audit as JSON values, the most probably wrong first, each made when it is read.

  Attributes:
    rows: N rows.
    label: int [N], their labels.
    found: their audit.
    order: int [N], the numbers of the rows in this order.
    name: gives the name of an example by its id; None if it has none.
  """

  rows: rows_lib.Rows
  label: np.ndarray
  found: measure.Audit
  order: np.ndarray
  name: Callable[[int], str] | None = None

  def __len__(self) -> int:
    return len(self.order)

  def __getitem__(self, place: Any) -> Any:
    if isinstance(place, slice):
      return [self.row(i) for i in self.order[place]]
    return self.row(self.order[place])

  def row(self, i: int) -> dict[str, Any]:
    """The i-th one of the rows."""
    found = self.found
    index = int(self.rows.index[i])
    label = int(self.label[i])
    suggested = int(found.suggested[i])
    listed = {
      'index': index,
      'label': label,
      'probability': round(float(found.probability[i]), 6),
      'wrong': round(float(found.wrong[i]), 6),
      'suggested': suggested,
      'kind': str(found.kind[i]),
    }
    if names := self.rows.class_names:
      listed |= {'label_name': names[label], 'suggested_name': names[suggested]}
    if self.name:
      listed['name'] = self.name(index)
    return listed


def write_csv(path: str, listed: Sequence[Mapping[str, Any]]) -> None:
  """Writes the rows of an audit, a line each."""
  reporting.write_csv(list(listed[0]), listed, path)


def write_suggested(path: str, listed: Listed) -> None:
  """Writes the rows of an audit with the suggested labels in the place of wrong ones.

  A .csv file is the labels.csv of the image folder (docs/data.md): a training of this folder then
  takes the suggested labels. Others are files of rows. Weights and annotators of the labels are
  left out: they are those of the labels before.
  """
  if str(path).endswith('.csv'):
    _write_table(path, listed)
    return
  labels = np.where(listed.found.kind == 'wrong', listed.found.suggested, listed.label)[:, None]
  given = {'label_weight': None, 'annotator': None}
  rows_lib.write(path, dataclasses.replace(listed.rows, labels=labels, **given))


TABLE_COLUMNS = ('file', 'label', 'was', 'wrong')


def _write_table(path: str, listed: Listed) -> None:
  """Writes labels.csv with the suggested labels."""
  names = listed.rows.class_names or ()
  with (
    run_files.replacing(path) as unfinished,
    open(unfinished, 'w', newline='', encoding='utf-8') as stream,
  ):
    # As they are: a training reads them, and looks for the files and the classes of these names.
    writer = csv.writer(stream, lineterminator='\n')
    writer.writerow(TABLE_COLUMNS)
    for i in np.argsort(listed.rows.index, kind='stable'):
      row = listed.row(i)
      label = row['suggested'] if row['kind'] == 'wrong' else row['label']
      writer.writerow([row['name'], names[label], names[row['label']], row['wrong']])


def report(
  source: probe.FileOrArrays,
  settings: probe.Settings,
  examples: 'Examples | None' = None,
  rounds: int = ROUNDS,
  probs_to: str | None = None,
  probs_from: str | None = None,
) -> reporting.Report:
  """The audit of a file of rows (`rows.read`), or of rows. Of votes the consensus is audited.

  Args:
    source: the file, or the rows.
    settings, rounds: as in `audit`.
    probs_to: where p [N, K] is written, as `pred_probs` of `audit`.
    probs_from: a file of such p, which no head is fitted for (`read_probs`).
    examples: the data set of the rows. The page shows some of its images; None shows none.

  Returns:
    The report. 'rows' of its JSON values are `Listed`.

  Raises:
    ValueError: the file or a setting is wrong, or an example has several labels that are no votes.
  """
  rows, name = probe.read(source, 'the rows')
  names = rows.class_names
  if examples is not None:
    rows = examples.named(rows)
    names = examples.info.shown_names or rows.class_names
  with rows_lib.files.reading(name):
    label = rows.consensus
  if probs_from:
    p = read_probs(probs_from, len(label), rows.num_classes)
    found, failures, chosen = measure.audit(p, label), 0, 0
  else:
    of_labels = rows.features, label, settings, rounds
    found, failures, chosen = _audit(*of_labels, probs_to, rows.num_classes)
  order = np.argsort(-found.wrong, kind='stable')
  listed = Listed(rows, label, found, order, examples.name if examples else None)

  def shown(k):
    return str(k) if names is None else names[k]

  pairs: list[dict[str, Any]] = []
  for k, y, rate, share in found.pairs(_SHOWN):
    pairs.append({'truth': k, 'label': y, 'rate': rate, 'share': share})
    if classes := rows.class_names:
      pairs[-1] |= {'truth_name': classes[k], 'label_name': classes[y]}
  counts = {kind: int((found.kind == kind).sum()) for kind in measure.KINDS}
  worst = [row for row in listed[:_SHOWN] if row['kind'] == 'wrong']
  tables = [
    reporting.Table(
      'Labels that people confuse',
      ['truth', 'label', 'of this truth', 'of all'],
      [
        [shown(x['truth']), shown(x['label']), f'{x["rate"]:.1%}', f'{x["share"]:.2%}']
        for x in pairs
      ],
    ),
    reporting.Table(
      'Labels that are most probably wrong',
      ['index', 'label', 'suggested', 'p of the label', 'p wrong'],
      [
        [
          str(x['index']),
          shown(x['label']),
          shown(x['suggested']),
          f'{x["probability"]:.3f}',
          f'{x["wrong"]:.3f}',
        ]
        for x in worst
      ],
    ),
  ]
  head = None if probs_from else settings.heads[0]
  by = (
    f'the probabilities of {probs_from}'
    if probs_from
    else f'the location of {head} fitted to the other {settings.folds - 1} of {settings.folds} '
    f'folds ({reporting.counted(chosen, "round")})'
  )
  agreement = np.mean(found.probability == found.confidence)
  notes = [
    'The error is over examples. That the location may be wrong is not in it: the true error is '
    'larger.',
    f'{agreement:.0%} of the labels are the most probable class of the location. Where the '
    'features tell little, it takes labels for wrong that are not.',
  ]
  if note := rows.consensus_note():
    notes.append(note)
  if failures:
    notes.append(f'{_unfinished(failures, "--max_iter", settings)}.')
  if head == 'det' and rounds == 1:
    notes.append(
      'det has no noise. After one round its p is that of the label: it finds too few wrong ones.'
    )
  truth = _by_truth(listed, examples) if examples is not None else None
  if truth is not None:
    notes.append(
      f'The task knows the true classes. {truth["wrong"]:,} labels are wrong: '
      f'{truth["wrong_of_listed"]:,} of the {counts["wrong"]:,} that are listed as wrong, and '
      f'{truth["wrong_of_worst"]} of the {min(_WORST, len(label))} that are most probably wrong.'
    )
  if examples is not None and not examples.are_images:
    notes.append(f'There are no pictures of examples of {examples.info.channels} channels.')
  return reporting.Report(
    title='Audit of labels',
    introduction=f'{len(label):,} labels of {name}, by {by}: '
    f'{found.share:.1%} ± {found.share_error:.1%} are wrong. '
    f'{counts["wrong"]:,} are listed as wrong, {counts["ambiguous"]:,} as ambiguous.',
    tables=[table for table in tables if table.lines],
    notes=notes,
    draw=lambda: _galleries(listed, examples, shown) if examples and examples.are_images else {},
    json={
      'head': head,
      'rounds': chosen,
      'nll': found.nll,
      'share': found.share,
      'share_error': found.share_error,
      'counts': counts,
      'pairs': pairs,
      'rows': listed,
    }
    | ({} if truth is None else {'truth': truth}),
  )


def _by_truth(listed: Listed, examples: 'Examples') -> dict[str, int] | None:
  """Numbers of labels that are wrong, where the task knows the true classes."""
  info = examples.info
  if not info.knows_truth(examples.whole):
    return None
  found = listed.found
  label = listed.label
  is_wrong = info.true_classes(examples.whole, listed.rows.index) != label
  return {
    'wrong': int(is_wrong.sum()),
    'wrong_of_listed': int(is_wrong[found.kind == 'wrong'].sum()),
    'wrong_of_worst': int(is_wrong[listed.order[:_WORST]].sum()),
  }


def _galleries(
  listed: Listed, examples: 'Examples', shown: Callable[[int], str]
) -> dict[str, reporting.Gallery]:
  """Images of the worst labels, of the most ambiguous ones, and of the most confused pairs."""
  found = listed.found
  label = listed.label

  def likely(i):
    return f'{found.wrong[i]:.3f}'

  def moved(i):
    return f'{shown(label[i])}\n→ {shown(found.suggested[i])}\n{likely(i)}'

  def unsure(i):
    others = '' if label[i] == found.suggested[i] else f' or\n{shown(found.suggested[i])}'
    return f'{shown(label[i])}{others}?\n{found.confidence[i]:.3f}'

  wrong = listed.order[: (found.kind == 'wrong').sum()]
  ambiguous = np.flatnonzero(found.kind == 'ambiguous')
  ambiguous = ambiguous[np.argsort(found.confidence[ambiguous], kind='stable')]
  # name: (caption, row numbers, text below a picture)
  chosen = {
    'worst': (
      'Labels that are most probably wrong: label → suggested, and the probability that the label '
      'is wrong',
      wrong[:_THUMBNAILS],
      moved,
    ),
    'ambiguous': (
      'The most ambiguous: label, the most probable truth if it is another, and the largest p of a '
      'class',
      ambiguous[:_THUMBNAILS],
      unsure,
    ),
  }
  for number, (k, y, rate, _) in enumerate(found.pairs(_SHOWN), 1):
    rows = wrong[(label[wrong] == y) & (found.suggested[wrong] == k)]
    caption = f'Truth {shown(k)}, label {shown(y)}: {rate:.1%} of this truth'
    chosen[f'pair_{number}'] = caption, rows[:_THUMBNAILS_OF_PAIR], likely
  numbers = np.unique(np.concatenate([rows for _, rows, _ in chosen.values()]))
  if not len(numbers):
    return {}
  read = examples.read(listed.rows.index[numbers], listed.rows.provenance.get('image_size'))
  other = [i for i, y in zip(numbers, read.labels, strict=True) if label[i] not in y]
  galleries = {}
  for name, (caption, rows, text) in chosen.items():
    places = [n for n in np.searchsorted(numbers, rows) if read.images[n] is not None]
    if count := len({*numbers[places]} & {*other}):
      caption += f'. {count} of {len(places)} have another label in {examples.task.name}'
    thumbnails = [
      reporting.Thumbnail(
        reporting.thumbnail_png(read.images[n]),
        f'{text(numbers[n])}  #{listed.rows.index[numbers[n]]}',
        examples.name(int(listed.rows.index[numbers[n]])),
      )
      for n in places
    ]
    if thumbnails:
      galleries[name] = reporting.Gallery(f'{caption}.', thumbnails)
  return galleries
