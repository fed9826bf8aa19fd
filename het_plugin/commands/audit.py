"""Finds wrong labels of saved representations.

    python -m het_plugin.audit --train=train.npz --csv=audit.csv --json=audit.json
    python -m het_plugin.audit --train=train.npz --suggest=corrected.npz
    python -m het_plugin.audit --checkpoint=model.safetensors --dataset=birds --html=audit.html
    python -m het_plugin.audit --train=train.npz --dataset=digits --html=audit.html

Fits a head to each fold's other folds, and compares the labels with its location: what it says of
the classes without the noise. Then it fits the head to what it found, in --rounds rounds or fewer.
Prints the share of wrong labels, the pairs of classes that people confuse, and the labels that are
most probably wrong. --csv and --json list every example: index, label, probability of the label,
probability that it is wrong, suggested label, and its kind: wrong, ambiguous or fine. --suggest
writes the rows with suggested labels in place of wrong ones. Of several labels of an example, which
are votes, the most frequent one is audited; where it is known who gave them, each annotator has
confusions of their own, and a quality. With --dataset the page of --html
shows images of the worst labels, of the most ambiguous ones and of the confused pairs. The index of
a row is then the number of its example in --split.
--C, --C_noise and --num_factors may list several values, from which held-out labels choose; with
--C_noise=auto every fit chooses from no noise and shares of C.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from het_plugin import estimators, evaluation, measures, reporting, runs, weights
from het_plugin import rows as rows_lib
from het_plugin.cli.settings import ResultFiles
from het_plugin.commands._rows import RowsSettings, TextOrArrays, have_learned, read
from het_plugin.estimators.settings import DET_TOL, ROUNDS, Grid, GridSettings, part
from het_plugin.rows import files, shards
from het_plugin.system.flag_values import Head
from het_plugin.system.ranges import NOT_EMPTY, Count, NotNegative

TABLE_COLUMNS = ('file', 'label', 'was', 'wrong')
_SHOWN = 10
_WORST = 100  # whose truth is counted
_COMPARED = 100  # whose label is compared with that of the data set
_THUMBNAILS = 24
_THUMBNAILS_OF_PAIR = 8
# Flags of the fits that --pred_probs replaces.
_OF_FITS = ('head', 'C', 'C_noise', 'num_factors', 'rounds', 'folds', 'max_iter', 'seed')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RowsSettings, Grid, ResultFiles):
  """Which labels are audited, and how.

  Attributes:
    dataset: The task to represent, or of the rows of --train.
    split: Split of --dataset.
    head: The head to fit.
    rounds: Largest number of rounds. From the second one on, the head is fitted to what was found.
    csv: Where to write a line per example; as Parquet if it ends in .parquet.
    suggest: Where to write the rows with suggested labels; with --dataset also a table: for
      image_folder:PATH it is PATH/labels.csv, which a training of PATH reads, and parquet:PATH and
      webdataset:PATTERN read it as PATH?labels=FILE.
    pred_probs: A .npy file of out-of-fold probabilities [N, K], instead of fits.
    write_pred_probs: Where to write the out-of-fold probabilities [N, K], as .npy.
  """

  dataset: str | None = None
  split: str = 'train'
  head: Head = 'det'
  C_noise: Annotated[tuple[NotNegative | Literal['auto'], ...], NOT_EMPTY] = (0.1,)
  num_factors: Annotated[tuple[Count, ...], NOT_EMPTY] = (4,)
  rounds: Count = ROUNDS
  csv: str | None = None
  suggest: str | None = None
  pred_probs: str | None = None
  write_pred_probs: str | None = None

  @property
  def fits(self) -> GridSettings:
    """Settings of the fits."""
    tol = DET_TOL if self.head == 'det' else GridSettings.tol
    return GridSettings((self.head,), tol=tol, **vars(part(self, Grid)))


def run(settings: Settings) -> reporting.Report:
  """The labels that are wrong, and those that people confuse."""
  fits = settings.fits
  suggest = settings.suggest or ''
  settings.check_rows(['train'], [])
  if 'split' in settings.given and not settings.dataset:
    raise ValueError('--split is for --dataset: a split of a file is --train=F.npz:SPLIT')
  if settings.head == 'det':
    settings.refuse(['C_noise', 'num_factors'], '--head=det, which has no noise')
  if suggest and not suggest.endswith(('.csv', *weights.files.SUFFIXES)):
    raise ValueError(f'--suggest={suggest} must end in .npz, .safetensors or .csv')
  if settings.pred_probs:
    settings.refuse((*_OF_FITS, 'write_pred_probs'), '--pred_probs, which is not fitted')
  if settings.write_pred_probs and not settings.write_pred_probs.endswith('.npy'):
    raise ValueError(f'--write_pred_probs={settings.write_pred_probs} must end in .npy')
  examples = None
  if settings.dataset:
    examples = evaluation.examples.Examples.of(settings.dataset, settings.split)
  if suggest.endswith('.csv') and not (examples and examples.have_names):
    raise ValueError(
      f'--suggest={suggest} needs --dataset=image_folder:PATH, parquet:PATH or webdataset:PATTERN, '
      'whose examples it names'
    )
  source = settings.train or ''
  if settings.checkpoint:
    (source,) = settings.represented('het_plugin.audit', [settings.split])
  if suggest:
    file = runs.sources.file_of(runs.sources.open_source(source), settings.split)
    named = files.partition_source(file or '')[0].split(',')
    read = [file for x in named for file in (shards.names(x) if '*' in x else [x])]
    if Path(suggest).resolve() in (Path(x).resolve() for x in read):
      raise ValueError(f'--suggest={suggest} is read by the audit: name another file')
  probs = settings.write_pred_probs, settings.pred_probs
  return report(source, fits, examples, settings.rounds, *probs, settings.unfinished)


@dataclasses.dataclass(frozen=True, eq=False)
class Listed(Sequence):
  """The rows of an audit as JSON values, the most probably wrong first, each made when it is read.

  Attributes:
    rows: N rows.
    label: int [N], their labels.
    found: their audit.
    examples: names them; None where their data set is not known.
  """

  rows: rows_lib.Rows
  label: np.ndarray
  found: measures.audit.Audit
  examples: evaluation.examples.Examples | None = None

  @functools.cached_property
  def order(self) -> np.ndarray:
    """Numbers of the rows, int [N]."""
    return np.argsort(-self.found.wrong, kind='stable')

  def __len__(self) -> int:
    return len(self.label)

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
    listed: dict[str, Any] = {
      'index': index,
      'label': label,
      'probability': round(float(found.probability[i]), 6),
      'wrong': round(float(found.wrong[i]), 6),
      'suggested': suggested,
      'kind': str(found.kind[i]),
    }
    if names := self.rows.class_names:
      listed |= {'label_name': names[label], 'suggested_name': names[suggested]}
    if self.examples:
      listed['name'] = self.examples.name(index)
      if folder := self.examples.folder:
        listed['path'] = str(folder / listed['name'])
    return listed

  def table(self) -> Iterator[dict[str, Any]]:
    """The rows in the order of their ids, with suggested labels, as a table of labels."""
    names = self.rows.class_names or range(self.rows.num_classes)
    for i in np.argsort(self.rows.index, kind='stable'):
      row = self.row(i)
      label = row['suggested'] if row['kind'] == 'wrong' else row['label']
      values = row['name'], names[label], names[row['label']], row['wrong']
      yield dict(zip(TABLE_COLUMNS, values, strict=True))


def write_suggested(listed: Listed, path: str) -> None:
  """Writes the rows of an audit with the suggested labels in the place of wrong ones, and says so.

  A .csv file is a table of labels (docs/data.md), which a training then takes in the place of those
  of the data. Others are files of rows. Weights and annotators of the labels are
  left out: they are those of the labels before.
  """
  is_wrong = listed.found.kind == 'wrong'
  said = f'\n{path}: {is_wrong.sum():,} of {len(listed):,} labels are suggestions.'
  if str(path).endswith('.csv'):
    reporting.write_csv(TABLE_COLUMNS, listed.table(), path)
    if not (listed.examples and listed.examples.folder):
      said += f'\nA training takes them with ?labels={path} behind the path of the data.'
  else:
    labels = np.where(is_wrong, listed.found.suggested, listed.label)[:, None]
    given = {'label_weight': None, 'annotator': None}
    rows_lib.write(path, dataclasses.replace(listed.rows, labels=labels, **given))
  print(said)


def report(
  source: TextOrArrays,
  settings: GridSettings,
  examples: evaluation.examples.Examples | None = None,
  rounds: int = ROUNDS,
  probs_to: str | None = None,
  probs_from: str | None = None,
  unfinished: Path | None = None,
) -> reporting.Report:
  """The audit of what `open_source` takes, or of rows. Of votes the consensus is audited.

  Args:
    source: the text, or the rows.
    settings, rounds: as in `audit`.
    probs_to: where p [N, K] is written, as `pred_probs` of `audit`.
    probs_from: a file of such p, which no head is fitted for (`estimators.audit.read_probs`).
    unfinished: a folder from which stopped fits go on (`resuming.kept`); None keeps nothing.
    examples: the data set of the rows. The page shows some of its images; None shows none.

  Returns:
    The report. 'rows' of its JSON values are `Listed`.

  Raises:
    ValueError: the file or a setting is wrong, or an example has several labels that are no votes.
  """
  split = examples.split if examples else 'train'
  rows, name = read(source, 'the rows', split)
  names = rows.class_names
  if examples is not None:
    rows = examples.named(rows)
    names = examples.info.shown_names or rows.class_names
  with rows_lib.files.reading(name):
    label = rows.consensus
  has_votes = rows.annotator is not None and rows.labels.shape[1] > 1
  given: dict[str, Any] = {}
  if has_votes:
    given = {'votes': rows.labels, 'annotator': rows.annotator}
  if probs_from:
    p = estimators.audit.read_probs(probs_from, len(label), rows.num_classes)
    found, failures, chosen = measures.audit.audit(p, label, **given), 0, 0
  else:
    of_labels = rows.features, label, settings, rounds
    with estimators.resuming.kept(unfinished, settings, rows):
      found, failures, chosen = estimators.audit.in_rounds(
        *of_labels, probs_to, rows.num_classes, **given
      )
  listed = Listed(rows, label, found, examples)

  def shown(k):
    return str(k) if names is None else names[k]

  pairs: list[dict[str, Any]] = []
  for k, y, rate, share in found.pairs(_SHOWN if found.is_supported else 0):
    pairs.append({'truth': k, 'label': y, 'rate': rate, 'share': share})
    if classes := rows.class_names:
      pairs[-1] |= {'truth_name': classes[k], 'label_name': classes[y]}
  counts = {kind: int((found.kind == kind).sum()) for kind in measures.audit.KINDS}
  worst = [row for row in listed[:_SHOWN] if row['kind'] == 'wrong']
  shown_p = {'p of the label': 'probability', 'p wrong': 'wrong'} if found.is_supported else {}
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
      ['index', 'label', 'suggested', *shown_p],
      [
        [
          str(x['index']),
          shown(x['label']),
          shown(x['suggested']),
          *(f'{x[name]:.3f}' for name in shown_p.values()),
        ]
        for x in worst
      ],
    ),
  ]
  annotators = []
  if found.annotators is not None:
    names_of = 'annotator', 'votes', 'quality', 'stderr'
    of_each = zip(*(x.tolist() for x in found.annotators), strict=True)
    annotators = [dict(zip(names_of, x, strict=True)) for x in of_each]
    worst_of = sorted(annotators, key=lambda x: x['quality'])[:_SHOWN]
    lines = [
      [str(x['annotator']), str(x['votes']), f'{x["quality"]:.1%}', f'{x["stderr"]:.1%}']
      for x in worst_of
    ]
    title = f'Annotators whose votes are most often wrong, of {len(annotators):,}'
    tables.append(reporting.Table(title, ['annotator', 'votes', 'right', '±'], lines))
  head = None if probs_from else settings.heads[0]
  by = (
    f'the probabilities of {probs_from}'
    if probs_from
    else f'the location of {head} fitted to the other {settings.folds - 1} of {settings.folds} '
    f'folds ({reporting.counted(chosen, "round")})'
  )
  share = (
    f'{found.share:.1%} ± {found.share_error:.1%} are wrong. '
    f'{counts["wrong"]:,} are listed as wrong, {counts["ambiguous"]:,} as ambiguous.'
  )
  notes = [
    'The error is over examples. That the location may be wrong is not in it: the true error is '
    'larger.',
    f'{found.agreement:.0%} of the labels are the most probable class of the location. Where the '
    'features tell little, it takes labels for wrong that are not.',
  ]
  if not found.is_supported:
    share = 'their features do not tell what share is wrong.'
    notes = [
      f'Only {found.agreement:.0%} of the labels are the most probable class of the location, and '
      f'{measures.audit.LEAST_AGREEMENT:.0%} are needed to tell wrong labels from those that are '
      'hard to tell. The list is still an order to look at them; correct none without a look.'
    ]
  if note := rows.consensus_note():
    notes.append(note)
  if failures:
    notes.append(f'{estimators.audit.not_converged(failures, "--max_iter", settings)}.')
  if head == 'det' and rounds == 1:
    notes.append(
      'det has no noise. After one round its p is that of the label: it finds too few wrong ones.'
    )
  if head and have_learned(rows):
    notes.append(
      'The features are of a run that was trained on these labels. It hides the wrong ones that it '
      'has learned: take the features of another backbone.'
    )
  truth = {}
  if examples and examples.info.true_classes and examples.info.knows_truth(examples.whole):
    is_wrong = examples.info.true_classes(examples.whole, rows.index) != label
    truth = {
      'wrong': int(is_wrong.sum()),
      'wrong_of_listed': int(is_wrong[found.kind == 'wrong'].sum()),
      'wrong_of_worst': int(is_wrong[listed.order[:_WORST]].sum()),
    }
    notes.append(
      f'The task knows the true classes. {truth["wrong"]:,} labels are wrong: '
      f'{truth["wrong_of_listed"]:,} of the {counts["wrong"]:,} that are listed as wrong, and '
      f'{truth["wrong_of_worst"]} of the {min(_WORST, len(label))} that are most probably wrong.'
    )
  if examples and 'dataset' not in rows.provenance:  # features of one's own
    notes.extend(_other_labels(examples, rows.index, label))
  are_images = examples is not None and examples.are_images
  if examples is not None and not are_images:
    notes.append(f'There are no pictures of examples of {examples.info.channels} channels.')
  return reporting.Report(
    title='Audit of labels',
    introduction=f'{len(label):,} labels of {name}, by {by}: {share}',
    tables=[table for table in tables if table.lines],
    notes=notes,
    draw=lambda: _galleries(listed, pairs, shown) if are_images else {},
    writers={
      'csv': functools.partial(reporting.write_table, list(listed[0]), listed),
      'suggest': functools.partial(write_suggested, listed),
    },
    written=functools.partial(estimators.resuming.forget, None if probs_from else unfinished),
    json={
      'head': head,
      'rounds': chosen,
      'nll': found.nll,
      'share': found.share if found.is_supported else None,
      'share_error': found.share_error if found.is_supported else None,
      'agreement': found.agreement,
      'counts': counts,
      'pairs': pairs,
      'annotators': annotators,
      'rows': listed,
    }
    | ({'truth': truth} if truth else {}),
  )


def _other_labels(
  examples: evaluation.examples.Examples, index: np.ndarray, label: np.ndarray
) -> list[str]:
  """A note if labels of the data set are not those of the rows. It reads some examples only."""
  chosen = np.unique(np.linspace(0, len(index) - 1, _COMPARED).astype(int))
  of_data = examples.labels(index[chosen])  # [n, L]
  count = int((of_data != label[chosen, None]).all(axis=1).sum())
  if not count:
    return []
  return [
    f'Of {len(chosen)} rows that were compared, {count} have another label in '
    f'{examples.task.name}. If you changed none, the array index, or without it the order of the '
    'rows, is of other examples: then names and suggested labels are wrong.'
  ]


def _galleries(
  listed: Listed, pairs: Sequence[Mapping[str, Any]], shown: Callable[[int], str]
) -> dict[str, reporting.Gallery]:
  """Images of the worst labels, of the most ambiguous ones, and of the most confused pairs."""
  found = listed.found
  label = listed.label
  examples = listed.examples

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
  for number, pair in enumerate(pairs, 1):
    k = pair['truth']
    y = pair['label']
    rows = wrong[(label[wrong] == y) & (found.suggested[wrong] == k)]
    caption = f'Truth {shown(k)}, label {shown(y)}: {pair["rate"]:.1%} of this truth'
    chosen[f'pair_{number}'] = caption, rows[:_THUMBNAILS_OF_PAIR], likely
  numbers = np.unique(np.concatenate([rows for _, rows, _ in chosen.values()]))
  if examples is None or not len(numbers):
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
