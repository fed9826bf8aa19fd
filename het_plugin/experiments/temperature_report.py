"""The comparison of ways to choose tau: table, plots and page."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from het_plugin import reporting
from het_plugin.experiments import runs as runs_lib
from het_plugin.experiments import temperature
from het_plugin.training import run_files


def write(rows: Sequence[Mapping[str, Any]], output_dir: Path) -> str:
  """Writes results.json, results.txt, the plots and index.html; returns the table."""
  rows = temperature.with_p_values(rows)
  reporting.write_json(rows, output_dir / 'results.json')
  shown = [{k: v for k, v in row.items() if k not in ('replications', 'row')} for row in rows]
  table = reporting.text_table(shown, row_title='method')
  (output_dir / 'results.txt').write_text(table + '\n')
  tau_nll = reporting.lines_png(
    _tau_nll(rows), xlabel='temperature tau', ylabel='test NLL (nats per example)', log_x=True
  )
  (output_dir / 'tau_nll.png').write_bytes(tau_nll)
  figures = [
    reporting.Figure(
      tau_nll,
      'Test NLL by tau: the trials of a search, the end of the others; means over replications.',
      'Test NLL of every training against its temperature.',
    )
  ]
  folders = {
    row['head']: output_dir / 'seed_0' / row['replications'][0]['chosen'] for row in rows
    if row['single training'] == 'yes'
  }  # fmt: skip
  if folders:
    lines = {
      title: runs_lib.curves(run_files.read_lines(folder / 'metrics.jsonl'))
      for title, folder in folders.items()
    }
    (output_dir / 'curves.png').write_bytes(reporting.curves_png(lines))
    figures.append(
      reporting.Figure(
        reporting.curve_pngs(lines),
        'Training loss and temperature of the methods of a single training, with seed 0.',
        'Training loss and temperature by step.',
      )
    )
  chosen = output_dir / 'seed_0' / rows[-1]['replications'][0]['chosen'] / 'config.gin'
  page = reporting.html_page(
    title='Ways to choose the temperature',
    introduction='Mean and standard error over '
    f'{len(rows[0]["replications"])} replications, as table 13 of Collier et al. 2023.',
    rows=shown,
    row_title='method',
    notes=[
      'NLL and prec@1: of the test set, which neither training nor the choice of tau saw. '
      'With (2 folds) it chose tau. Validation NLL: of the set that chose tau.',
      'trainings and steps: what one replication takes. ms/step: of the chosen training.',
      "p: of Welch's test that the NLL is that of simple training.",
    ],
    figures=figures,
    provenance=reporting.Provenance.of_this_process(
      'het_plugin.tune', {rows[-1]['head']: chosen.read_text()}
    ),
  )
  (output_dir / 'index.html').write_text(page)
  return table


def _tau_nll(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
  """{title: (tau, test NLL)}, means over replications.

  A search has its trials by tau, another method its end. A retrained one is left out if its search
  has a line.
  """
  lines, names = {}, {row['row'] for row in rows}
  for row in rows:
    if row['single training'] == 'yes':
      lines[row['head']] = [row['tau']], [row['nll']]
    elif row['row'].replace(':retrain', ':validation') not in names - {row['row']}:
      by_tau = {}
      for outcome in row['replications']:
        for trial in outcome['trials']:
          by_tau.setdefault(trial['tau'], []).append(trial['nll'])
      taus = sorted(by_tau)
      lines[row['head']] = taus, [statistics.fmean(by_tau[tau]) for tau in taus]
  return lines
