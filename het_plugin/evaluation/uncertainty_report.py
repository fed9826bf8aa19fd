"""The report of `evaluate`: its numbers as JSON-able rows, its table, its plots and its page."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from het_plugin import reporting
from het_plugin.evaluation import calibration, class_covariance, uncertainty

_NEIGHBOURS = 12  # classes listed beside a correlation matrix
_ROW_TITLE = 'checkpoint'
_SHOWN = (
  *('num_classes', 'mesh', 'nll', 'ece', 'adaptive_ece', 'brier', 'ranking_ap', 'aurc', 'e_aurc'),
  *('auroc_errors', 'entropy', 'mutual_information', 'num_samples'),
)
_SCORE_TITLES = {
  'max_prob': 'max. probability',
  'entropy': 'entropy',
  'mutual_information': 'mutual information',
}


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
  """What is known of one checkpoint, or of one file of predictions.

  Attributes:
    name: of its row.
    source: the checkpoint or file.
    details: numbers of the model, for the row.
    scores: of the split.
    unknown: of the out-of-distribution split.
    looks: class correlations of the images drawn.
    no_covariance: why there are none.
    homoglyphs: `class_covariance.homoglyph_rate`, of glyph tasks.
    class_names: as shown.
    config: gin text; None for a file.
  """

  name: str
  source: str
  details: Mapping[str, Any]
  scores: uncertainty.ExampleScores
  unknown: uncertainty.Uncertainty | None = None
  looks: Sequence[class_covariance.ClassCovariance] = ()
  no_covariance: str | None = None
  homoglyphs: Mapping[str, Any] | None = None
  class_names: Sequence[str] | None = None
  config: str | None = None


def results(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
  """All numbers, a mapping a row.

  Raises:
    ValueError: rows are of different examples.
  """
  rows = []
  first = evaluations[0]
  for evaluation in evaluations:
    scores = evaluation.scores
    confidence = np.exp(scores.uncertainty.log_confidence)
    row = {
      'name': evaluation.name,
      'source': evaluation.source,
      **evaluation.details,
      **uncertainty.summarize(scores),
      'reliability': dataclasses.asdict(calibration.reliability(confidence, scores.correct)),
    }
    if evaluation is not first:
      try:
        row['difference'] = uncertainty.difference(scores, first.scores)
      except ValueError as error:
        raise ValueError(f'{evaluation.name} against {first.name}: {error}') from error
    if evaluation.unknown is not None:
      row['ood'] = uncertainty.detection(evaluation.unknown, scores.uncertainty)
      row['num_ood_examples'] = len(evaluation.unknown.entropy)
    if evaluation.no_covariance:
      row['no_covariance'] = evaluation.no_covariance
    if evaluation.homoglyphs:
      row['homoglyphs'] = evaluation.homoglyphs
    row['covariance'] = [_look_row(look, evaluation.class_names) for look in evaluation.looks]
    rows.append(row)
  return rows


def _look_row(look: class_covariance.ClassCovariance, names) -> dict[str, Any]:
  anchor, correlation = _anchor(look)
  nearest = class_covariance.most_correlated(correlation, anchor, _NEIGHBOURS)
  return {
    'index': look.index,
    'label': look.label,
    'label_name': _name(names, look.label) if look.label >= 0 else None,
    'top': look.top,
    'top_names': [_name(names, k) for k in look.top],
    'probability': np.exp(look.log_prob),
    'correlation': look.correlation,
    'anchor': anchor,
    'anchor_name': _name(names, anchor),
    'most_correlated': [
      {'class': int(k), 'name': _name(names, k), 'correlation': float(correlation[k])}
      for k in nearest
    ],
  }


def _anchor(look: class_covariance.ClassCovariance) -> tuple[int, np.ndarray]:
  """The class whose neighbours are listed, the true one where there is one; its correlations."""
  if look.label >= 0:
    return look.label, look.with_label
  return int(look.top[0]), look.with_top


def _name(names: Sequence[str] | None, k: int) -> str:
  return str(k) if names is None else names[k]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Results as text."""
  return reporting.text_table([_shown(row) for row in rows], row_title=_ROW_TITLE)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
  """A row as `reporting` takes it."""
  shown = {name: row[name] for name in _SHOWN if name in row}
  shown |= {name: row[name] for name in row if name.startswith('precision_at_')}
  tables = {}
  if 'ood' in row:
    where = f'{row["ood_dataset"]} {row["ood_split"]}'
    tables |= {f'{where} by {_SCORE_TITLES[s]}': values for s, values in row['ood'].items()}
  if 'difference' in row:
    tables['difference to the first'] = row['difference']
  if 'homoglyphs' in row:
    rate = row['homoglyphs']
    tables['most correlated class is a homoglyph'] = {
      'rate': rate['rate'],
      'chance': rate['chance'],
      'images': rate['num_examples'],
      'stderr': {'rate': rate['stderr']},
    }
  errors = {name: row['stderr'].get(name) for name in ('nll', 'precision_at_1')}
  return {'head': row['name'], **shown, 'stderr': errors, 'tables': tables}


def plots(
  evaluations: Sequence[Evaluation], rows: Sequence[Mapping[str, Any]]
) -> dict[str, reporting.Figure]:
  """{file name: figure}."""
  confidence = {e.name: np.exp(e.scores.uncertainty.log_confidence) for e in evaluations}
  diagrams = {
    e.name: calibration.reliability(confidence[e.name], e.scores.correct) for e in evaluations
  }
  risks = {
    e.name: uncertainty.risk_coverage(e.scores.uncertainty.log_confidence, e.scores.correct)
    for e in evaluations
  }
  curves = {name: (np.arange(1, len(r) + 1) / len(r), r) for name, r in risks.items()}
  found = {
    'reliability': reporting.Figure(
      reporting.reliability_png(diagrams),
      'Accuracy by confidence. Dots are the mean confidence of a bin, their area its share of the '
      'examples; on the dotted line a model is calibrated.',
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
  with_unknown = [e for e in evaluations if e.unknown is not None]
  for score in dict.fromkeys(s for e in with_unknown for s in e.unknown.scores()):
    rocs = {
      e.name: uncertainty.roc(e.unknown.scores()[score], e.scores.uncertainty.scores()[score])
      for e in with_unknown
      if score in e.unknown.scores()
    }
    found[f'roc_{score}'] = reporting.Figure(
      reporting.unit_curves_png(
        rocs,
        title=f'unknown inputs told from known ones by {_SCORE_TITLES[score]}',
        x_label='share of known inputs flagged',
        y_label='share of unknown inputs flagged',
        diagonal=True,
      ),
      f'Unknown inputs told from known ones by {_SCORE_TITLES[score]}.',
      f'ROC curves of {_SCORE_TITLES[score]}.',
    )
  for evaluation, row in zip(evaluations, rows, strict=True):
    for look, numbers in zip(evaluation.looks, row['covariance'], strict=True):
      found[f'covariance_{file_name(evaluation.name)}_{look.index}'] = reporting.Figure(
        _covariance_png(look, numbers),
        f'{evaluation.name}, example {look.index}: which logits go up and down together.',
        f'Class correlations of example {look.index}.',
      )
  return found


def _covariance_png(look: class_covariance.ClassCovariance, numbers: Mapping[str, Any]) -> bytes:
  return reporting.covariance_png(
    reporting.CovariancePanel(
      image=look.image,
      title=f'example {look.index}: {numbers["label_name"] or "no label"}',
      classes=numbers['top_names'],
      probability=numbers['probability'],
      correlation=look.correlation,
      anchor=numbers['anchor_name'],
      neighbours=[(x['name'], x['correlation']) for x in numbers['most_correlated']],
    )
  )


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """How to read the columns; docs/uncertainty.md has the definitions."""
  lines = [
    'NLL: nats an example; prec@k: the label is among the k most probable classes; ECE: 15 bins; '
    'AURC: mean error rate over all coverages, E-AURC what it exceeds the best order by; AUROC '
    'errors: of telling wrong predictions from right ones by confidence.',
    '± is a standard error over the examples; differences to the first row are paired by example.',
  ]
  if any('ood' in row for row in rows):
    lines.append(
      'FPR@95: share of unknown inputs that pass a threshold which 95% of the known ones pass.'
    )
  return lines + [f'{r["name"]}: {r["no_covariance"]}' for r in rows if 'no_covariance' in r]


def introduction(rows: Sequence[Mapping[str, Any]]) -> str:
  """What was evaluated on, in a line."""
  first = rows[0]
  where = f' of {first["dataset"]}, split {first["split"]}' if 'dataset' in first else ''
  return f'{first["num_examples"]:,} examples{where}.'


def write(
  evaluations: Sequence[Evaluation], rows: Sequence[Mapping[str, Any]], output_dir: Path
) -> None:
  """Writes results.json, results.txt, the plots and index.html."""
  output_dir.mkdir(parents=True, exist_ok=True)
  reporting.write_json(rows, output_dir / 'results.json')
  (output_dir / 'results.txt').write_text(table(rows) + '\n')
  figures = plots(evaluations, rows)
  for name, figure in figures.items():
    (output_dir / f'{name}.png').write_bytes(figure.png)
  page = reporting.html_page(
    title='Predictive uncertainty',
    introduction=introduction(rows),
    rows=[_shown(row) for row in rows],
    row_title=_ROW_TITLE,
    notes=notes(rows),
    figures=list(figures.values()),
    provenance=reporting.Provenance.of_this_process(
      'het_plugin.evaluate', {e.name: e.config for e in evaluations if e.config}
    ),
  )
  (output_dir / 'index.html').write_text(page)


def file_name(name: str) -> str:
  return ''.join(c if c.isalnum() or c in '._-' else '_' for c in name).strip('_')
