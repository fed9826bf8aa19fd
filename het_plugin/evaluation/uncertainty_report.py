"""The report of `evaluate`: its numbers as rows of JSON values, its table, its plots, its page."""

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
  """The results of one checkpoint or of one file of predictions.

  Attributes:
    name: names its row.
    source: the checkpoint or file.
    details: further values for the row.
    scores: of the split.
    unknown: of the out-of-distribution split; None without one.
    looks: class correlations of some images.
    no_covariance: why there are no class correlations; None if there are.
    homoglyphs: `class_covariance.homoglyph_rate`, for glyph tasks.
    class_names: as shown; None shows numbers.
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
  """All numbers, one mapping per row.

  Raises:
    ValueError: the rows are of different examples.
  """
  rows = []
  first = evaluations[0]
  for evaluation in evaluations:
    scores = evaluation.scores
    row = {
      'name': evaluation.name,
      'source': evaluation.source,
      **evaluation.details,
      **uncertainty.summarize(scores),
      'reliability': dataclasses.asdict(_reliability(scores)),
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


def _reliability(scores: uncertainty.ExampleScores) -> calibration.Reliability:
  return calibration.reliability(np.exp(scores.uncertainty.log_confidence), scores.correct)


def _look_row(look: class_covariance.ClassCovariance, names) -> dict[str, Any]:
  # The list of neighbours is for the true class, without a label for the most probable class.
  labelled = look.label >= 0
  anchor = look.label if labelled else int(look.top[0])
  correlation = look.with_label if labelled else look.with_top
  nearest = class_covariance.most_correlated(correlation, anchor, _NEIGHBOURS)
  return {
    'index': look.index,
    'label': look.label,
    'label_name': _name(names, look.label) if labelled else None,
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


def _name(names: Sequence[str] | None, k: int) -> str:
  return str(k) if names is None else names[k]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """The rows as text."""
  return reporting.text_table([_shown(row) for row in rows], row_title=_ROW_TITLE)


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
  diagrams = {e.name: _reliability(e.scores) for e in evaluations}
  curves = {}
  for e in evaluations:
    risk = uncertainty.risk_coverage(e.scores.uncertainty.log_confidence, e.scores.correct)
    curves[e.name] = np.arange(1, len(risk) + 1) / len(risk), risk
  found = {
    'reliability': reporting.Figure(
      reporting.reliability_png(diagrams),
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
        reporting.covariance_png(_panel(look, numbers)),
        f'{evaluation.name}, example {look.index}: which logits go up and down together.',
        f'Class correlations of example {look.index}.',
        recolour=False,
      )
  return found


def _panel(look: class_covariance.ClassCovariance, numbers: Mapping[str, Any]):
  return reporting.CovariancePanel(
    image=look.image,
    title=f'example {look.index}: {numbers["label_name"] or "no label"}',
    classes=numbers['top_names'],
    probability=numbers['probability'],
    correlation=look.correlation,
    anchor=numbers['anchor_name'],
    neighbours=[(x['name'], x['correlation']) for x in numbers['most_correlated']],
  )


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """How to read the columns; docs/uncertainty.md has the definitions."""
  lines = [
    'NLL: nats per example; prec@k: the label is among the k most probable classes; ECE: 15 bins; '
    'AURC: mean error rate over all coverages; E-AURC: AURC minus that of the best order; AUROC '
    'errors: how well the confidence tells wrong predictions from right ones.',
    '± is a standard error over the examples; differences to the first row are paired by example.',
  ]
  if any('ood' in row for row in rows):
    lines.append(
      'FPR@95: share of unknown inputs that pass a threshold that 95% of the known inputs pass.'
    )
  return lines + [f'{r["name"]}: {r["no_covariance"]}' for r in rows if 'no_covariance' in r]


def introduction(rows: Sequence[Mapping[str, Any]]) -> str:
  """The examples evaluated on, in a line."""
  first = rows[0]
  where = f' of {first["dataset"]}, split {first["split"]}' if 'dataset' in first else ''
  return f'{first["num_examples"]:,} examples{where}.'


def report(
  evaluations: Sequence[Evaluation],
  rows: Sequence[Mapping[str, Any]],
  output_dir: str | None = None,
  json: str | None = None,
) -> None:
  """Prints the table; writes results.json, results.txt, the plots and index.html.

  Args:
    evaluations, rows: see `results`.
    output_dir: of the files; None writes none.
    json: another place for results.json.
  """
  if output_dir:
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    reporting.write_json(rows, folder / 'results.json')
    (folder / 'results.txt').write_text(table(rows) + '\n')
    figures = plots(evaluations, rows)
    for name, figure in figures.items():
      (folder / f'{name}.png').write_bytes(figure.png)
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
    (folder / 'index.html').write_text(page)
  if json:
    reporting.write_json(rows, json)
  print(f'{introduction(rows)}\n{table(rows)}')
  for row in rows:
    if 'no_covariance' in row:
      print(f'{row["name"]}: {row["no_covariance"]}')
  if output_dir:
    print(f'\nThe same with curves and pictures: {folder / "index.html"}')


def file_name(name: str) -> str:
  return ''.join(c if c.isalnum() or c in '._-' else '_' for c in name).strip('_')
