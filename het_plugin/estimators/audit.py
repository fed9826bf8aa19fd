"""Which labels of saved representations are wrong: out of fold, by the location of a head."""

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.model_selection import StratifiedKFold

from het_plugin import reporting, weights
from het_plugin import rows as rows_lib
from het_plugin.estimators import probe
from het_plugin.measures import audit as measure

# Those of the command. The share of wrong labels needs noise, so 'auto' is no default here: where
# it takes none, the location is that of DET, which finds too few.
SETTINGS = probe.Settings(('het_xl',), c_noise=(0.1,), num_factors=(4,))
_SHOWN = 10


def audit(
  features: np.ndarray, label: np.ndarray, settings: probe.Settings | None = None
) -> measure.Audit:
  """Audits labels by fits to the other folds, so that no label scores itself.

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
    features: float [N, D].
    label: int [N], class ids. Each class has at least `settings.folds` rows.
    settings: one head, by default `SETTINGS`, the folds, and its grid, from which held-out labels
      choose (`probe.choose`).

  Raises:
    ValueError: there are several heads, or too few rows of a class.
  """
  settings = SETTINGS if settings is None else settings
  if len(settings.heads) != 1:
    raise ValueError(f'--head={",".join(settings.heads)} must be one head')
  classes, y = np.unique(label, return_inverse=True)
  if len(classes) < 2:
    raise ValueError(f'the labels have {len(classes)} class: an audit needs two or more')
  counts = np.bincount(y).tolist()
  if min(counts) < settings.folds:
    raise ValueError(
      f'class {classes[counts.index(min(counts))]} has {min(counts)} rows: '
      f'--folds={settings.folds} needs at least as many of each class'
    )
  p = np.zeros((len(y), len(classes)), np.float32)
  starts, titles = {}, probe.fit_titles(settings, settings.folds)
  folds = StratifiedKFold(settings.folds, shuffle=True, random_state=settings.seed)
  for fitted, held_out in folds.split(np.zeros(len(y)), y):
    estimator, _, _ = probe.fit_best(
      settings.heads[0], features, y, fitted, settings, starts, titles
    )
    p[held_out] = estimator.predict_clean_proba(features[held_out])
  found = measure.audit(p, y)
  return dataclasses.replace(found, suggested=classes[found.suggested])


def write_csv(path: str, listed: Sequence[Mapping[str, Any]]) -> None:
  """Writes the rows of an audit, a line each."""
  text = io.StringIO()
  writer = csv.DictWriter(text, list(listed[0]), lineterminator='\n')
  writer.writeheader()
  writer.writerows(listed)
  with weights.replacing(path) as temporary:
    temporary.write_text(text.getvalue())


def write_suggested(path: str, source: str, listed: Sequence[Mapping[str, Any]]) -> None:
  """Writes the rows of a file with the suggested labels in the place of wrong ones."""
  rows = rows_lib.read(source, mapped=True)
  place = {int(i): n for n, i in enumerate(rows.index)}
  labels = np.array(rows.label)
  for row in listed:
    if row['kind'] == 'wrong':
      labels[place[row['index']]] = row['suggested']
  rows_lib.write(path, dataclasses.replace(rows, labels=labels[:, None], label_weight=None))


def report(source: str, settings: probe.Settings) -> reporting.Report:
  """The audit of a file of rows (`rows.read`) with one label per example.

  Raises:
    ValueError: the file or a setting is wrong, or an example has several labels.
  """
  rows, name = probe.read(source, 'the rows')
  label = rows.label
  found = audit(rows.features, label, settings)
  classes = np.unique(label)
  order = np.argsort(-found.wrong, kind='stable')
  listed = [
    {
      'index': int(rows.index[i]),
      'label': int(label[i]),
      'probability': round(float(found.probability[i]), 6),
      'wrong': round(float(found.wrong[i]), 6),
      'suggested': int(found.suggested[i]),
      'kind': str(found.kind[i]),
    }
    for i in order
  ]
  pairs = [
    {'truth': int(classes[k]), 'label': int(classes[y]), 'rate': rate, 'share': share}
    for k, y, rate, share in found.pairs(_SHOWN)
  ]

  def shown(k):
    return str(k) if rows.class_names is None else rows.class_names[k]

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
      ['index', 'label', 'suggested', 'p of the label'],
      [
        [str(x['index']), shown(x['label']), shown(x['suggested']), f'{x["probability"]:.3f}']
        for x in worst
      ],
    ),
  ]
  head = settings.heads[0]
  notes = ['The error is over examples. That the location may be wrong is not in it.']
  if head == 'det':
    notes.append('det has no noise: its p is that of the label, so it finds too few wrong ones.')
  return reporting.Report(
    title='Audit of labels',
    introduction=f'{len(label):,} labels of {name}, by the location of {head} fitted to '
    f'{settings.folds - 1} of {settings.folds} folds: {found.share:.1%} +-{found.share_error:.1%} '
    f'are wrong. {counts["wrong"]:,} are listed as wrong, {counts["ambiguous"]:,} as ambiguous.',
    tables=[table for table in tables if table.lines],
    notes=notes,
    json={
      'head': head,
      'share': found.share,
      'share_error': found.share_error,
      'counts': counts,
      'pairs': pairs,
      'rows': listed,
    },
  )
