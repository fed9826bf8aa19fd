"""The report of `evaluate`: its numbers as rows of JSON values, its table and its plots."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin import reporting
from het_plugin.evaluation import class_covariance
from het_plugin.evaluation.names import naming
from het_plugin.measures import agreement, uncertainty
from het_plugin.rows import Rows

_NEIGHBOURS = 12  # classes listed beside a correlation matrix
_SHOWN = (
  'num_classes',
  'mesh',
  'nll',
  'ece',
  'adaptive_ece',
  'brier',
  'ranking_ap',
  'aurc',
  'e_aurc',
  'auroc_errors',
  'entropy',
  'mutual_information',
  'num_samples',
)
_MEANINGS = {  # of the columns, as the notes explain them
  'nll': 'NLL: nats per example',
  'precision_at_1': 'prec@k: the label is among the k most probable classes',
  'ranking_ap': 'of a sigmoid, whose rows have a ranking AP, the share of these classes that are '
  'labels',
  'ece': 'ECE: 15 bins',
  'aurc': 'AURC: mean error rate over all coverages',
  'e_aurc': 'E-AURC: AURC minus the AURC of the best possible order',
  'auroc_errors': 'AUROC errors: how well the confidence separates wrong predictions from right '
  'ones',
  'entropy': 'entropy: of the predictive distribution, in nats',
  'mutual_information': 'MI: the part of the entropy that comes from the noise of the head',
}
_SCORE_TITLES = {
  'max_prob': 'max. probability',
  'entropy': 'entropy',
  'mutual_information': 'mutual information',
}


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
  """The results of one checkpoint or of one file of predictions."""

  name: str  # names its row
  source: str  # the checkpoint or file
  details: Mapping[str, Any]  # further values for the row
  scores: uncertainty.ExampleScores  # of the split
  # of the out-of-distribution split; None without one
  unknown: uncertainty.Uncertainty | None = None
  looks: Sequence[class_covariance.ClassCovariance] = ()  # class correlations of some images
  no_covariance: str | None = None  # why there are no class correlations; None if there are
  homoglyphs: Mapping[str, Any] | None = None  # `look_alikes.look_alike_rate`, where known
  agreement: Mapping[str, float] | None = None  # `agreement.summarize`, of a softmax
  # Accuracies on the true classes and the share of wrong labels, where a task knows them.
  truth: Mapping[str, Any] | None = None
  class_names: Sequence[str] | None = None  # as shown; None shows numbers
  config: str | None = None  # gin text; None for a file

  def class_name(self, k: int) -> str:
    return str(k) if self.class_names is None else self.class_names[k]

  def row(self, first: 'Evaluation') -> dict[str, Any]:
    """All numbers as JSON values, compared with the first evaluation."""
    row = {
      'name': self.name,
      'source': self.source,
      **self.details,
      **uncertainty.summarize(self.scores),
      'reliability': dataclasses.asdict(self.scores.reliability()),
    }
    if self is not first:
      with naming(f'{self.name} against {first.name}'):
        row['difference'] = uncertainty.difference(self.scores, first.scores)
    if self.unknown is not None:
      row['ood'] = uncertainty.detection(self.unknown, self.scores.uncertainty)
      row['num_ood_examples'] = len(self.unknown.entropy)
    optional = {
      name: getattr(self, name) for name in ('agreement', 'truth', 'no_covariance', 'homoglyphs')
    }
    row |= {name: x for name, x in optional.items() if x}
    row['covariance'] = [self._look_row(look) for look in self.looks]
    return row

  def _look_row(self, look: class_covariance.ClassCovariance) -> dict[str, Any]:
    order = np.argsort(-look.with_anchor, kind='stable')
    nearest = order[order != look.anchor][:_NEIGHBOURS]
    return {
      'index': look.index,
      'label': look.label,
      'label_name': self.class_name(look.label) if look.label >= 0 else None,
      'top': look.top,
      'top_names': [self.class_name(k) for k in look.top],
      'probability': np.exp(look.log_prob),
      'correlation': look.correlation,
      'anchor': look.anchor,
      'anchor_name': self.class_name(look.anchor),
      'most_correlated': [
        {'class': int(k), 'name': self.class_name(k), 'correlation': float(look.with_anchor[k])}
        for k in nearest
      ],
    }


def scored(
  parts: Iterable[Rows], ks: Sequence[int] = (1,)
) -> tuple[uncertainty.ExampleScores, agreement.AgreementScores | None]:
  """Scores of the parts of a split, and with a softmax those of its agreement with people's labels.

  `ks` are those of precision@k.
  """
  scores = []
  people = agreement.Parts()
  for part in parts:
    scores.append(uncertainty.score_examples(**part.labelled, ks=ks))
    if part.link == 'softmax':
      people.add(agreement.score_examples(part.log_prob, part.labels, part.label_weight))
  return uncertainty.concatenate(scores), people.joined()


def file_name(name: str) -> str:
  """The name of a row as a file is called, without a suffix."""
  return re.sub(r'[^\w.-]', '_', name).strip('_')


def make_report(evaluations: Sequence[Evaluation]) -> reporting.Report:
  """Compares all evaluations with the first, on the same examples."""
  rows = [evaluation.row(evaluations[0]) for evaluation in evaluations]
  where = '{dataset}, split {split}'.format(**rows[0]) if 'dataset' in rows[0] else 'a file'
  shown = [_shown(row) for row in rows]
  meanings = [
    text for name, text in _MEANINGS.items() if any(row.get(name) is not None for row in shown)
  ]
  notes = [
    f'{"; ".join(meanings)}.',
    '± is a standard error over the examples; differences to the first row are paired by example.',
  ]
  if len({e.scores.shares is None for e in evaluations}) > 1:
    notes.append(
      'Rows with a ranking AP are of a sigmoid: their NLL and Brier score are sums over classes, '
      'which cannot be compared with those of a softmax.'
    )
  if any('disagreement_correlation' in row.get('agreement', {}) for row in rows):
    notes.append(
      'Examples have the labels of several people: NLL, precision and calibration are means over a '
      'label drawn from their shares, as in the evaluations of a training.'
    )
  if any('truth' in row for row in rows):
    notes.append(
      'The true classes are known, and some labels are wrong. Clean accuracy is the share of right '
      'predictions: by the predictive distribution, and by the location without the noise.'
    )
  if any('ood' in row for row in rows):
    notes.append(
      'FPR@95: share of unknown inputs that pass a threshold that 95% of the known inputs pass.'
    )
  return reporting.Report(
    title='Predictive uncertainty',
    introduction=f'{reporting.counted(rows[0]["num_examples"], "example")} of {where}.',
    rows=shown,
    row_title='checkpoint',
    notes=notes + [f'{r["name"]}: {r["no_covariance"]}' for r in rows if 'no_covariance' in r],
    draw=lambda: _plots(evaluations, rows),
    json=rows,
    configs={e.name: e.config for e in evaluations if e.config},
  )


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
  """The columns that the tables show, as `reporting` takes them."""
  shown = {name: row[name] for name in _SHOWN if name in row}
  shown |= {name: row[name] for name in row if name.startswith('precision_at_')}
  tables = {}
  if 'ood' in row:
    where = f'{row["ood_dataset"]} {row["ood_split"]}'
    tables |= {f'{where} by {_SCORE_TITLES[s]}': values for s, values in row['ood'].items()}
  if 'difference' in row:
    tables['difference to the first'] = row['difference']
  if 'disagreement_correlation' in row.get('agreement', {}):
    tables['labels of several people'] = row['agreement']
  if 'truth' in row:
    tables['true classes'] = row['truth']
  if 'homoglyphs' in row:
    rate = row['homoglyphs']
    tables['most correlated class is a homoglyph'] = {
      'rate': rate['rate'],
      'chance': rate['chance'],
      'images': rate['num_examples'],
      'stderr': {'rate': rate['stderr']},
    }
  errors = {name: row['stderr'].get(name) for name in ('nll', 'precision_at_1')}
  return {'name': row['name'], **shown, 'stderr': errors, 'tables': tables}


def calibration_figures(
  scores: Mapping[str, uncertainty.ExampleScores],
) -> dict[str, reporting.Figure]:
  """{file name: figure}: the reliability diagram and the risk-coverage curve of each row."""
  curves = {}
  for name, x in scores.items():
    risk = uncertainty.risk_coverage(x.uncertainty.log_confidence, x.correct)
    curves[name] = np.arange(1, len(risk) + 1) / len(risk), risk
  return {
    'reliability': reporting.Figure(
      reporting.reliability_png({name: x.reliability() for name, x in scores.items()}),
      'Accuracy by confidence. A dot is at the mean confidence of a bin, with an area by its share '
      'of the examples. A calibrated model lies on the dotted line.',
      'Reliability diagram of each row.',
    ),
    'risk_coverage': reporting.Figure(
      reporting.unit_curves_png(
        curves,
        title='risk and coverage',
        x_label='coverage: share of the examples answered, the most confident first',
        y_label='error rate among them',
      ),
      'Error rate when only the most confident examples are answered.',
      'Risk-coverage curve of each row.',
    ),
  }


def _plots(
  evaluations: Sequence[Evaluation], rows: Sequence[Mapping[str, Any]]
) -> dict[str, reporting.Figure]:
  """{file name: figure}."""
  found = calibration_figures({e.name: e.scores for e in evaluations})
  unknown = {e.name: e.unknown.scores() for e in evaluations if e.unknown is not None}
  known = {e.name: e.scores.uncertainty.scores() for e in evaluations}
  for score in dict.fromkeys(score for of in unknown.values() for score in of):
    rocs = {
      name: uncertainty.roc(of[score], known[name][score])
      for name, of in unknown.items()
      if score in of
    }
    title = f'Detection of unknown inputs by {_SCORE_TITLES[score]}.'
    png = reporting.unit_curves_png(
      rocs,
      title=title,
      x_label='share of known inputs flagged',
      y_label='share of unknown inputs flagged',
      diagonal=True,
    )
    found[f'roc_{score}'] = reporting.Figure(png, title, f'ROC curves of {_SCORE_TITLES[score]}.')
  for evaluation, row in zip(evaluations, rows, strict=True):
    for look, numbers in zip(evaluation.looks, row['covariance'], strict=True):
      png = reporting.covariance_png(
        image=look.image,
        title=f'example {look.index}: {numbers["label_name"] or "no label"}',
        classes=numbers['top_names'],
        probability=numbers['probability'],
        correlation=look.correlation,
        anchor=numbers['anchor_name'],
        neighbours=[(x['name'], x['correlation']) for x in numbers['most_correlated']],
      )
      found[f'covariance_{file_name(evaluation.name)}_{look.index}'] = reporting.Figure(
        png,
        f'{evaluation.name}, example {look.index}: which logits go up and down together.',
        f'Class correlations of example {look.index}.',
        recolour=False,
      )
  return found
