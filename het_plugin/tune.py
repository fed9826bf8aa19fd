"""Compares ways to choose the temperature tau (Collier et al. 2023, section 4 and appendix G).

    python -m het_plugin.tune --method=all --output_dir=runs/temperature

trains what each method asks for, with every seed, and lays the methods out as table 13 does. A
training that is complete is not repeated: run the same command again to go on, or with more
methods to add their rows. In the output directory: results.json (one row a method), results.txt,
tau_nll.png, curves.png, index.html, and a folder a seed with a run directory a training.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from het_plugin import reporting
from het_plugin.config import command_line, registry
from het_plugin.experiments import runs as runs_lib
from het_plugin.experiments import temperature, vizier_suggestions
from het_plugin.training import compilation_cache, run_files

RUN = 'het_plugin/gin/runs/temperature_glyphs.gin'


def define_flags() -> None:
  command_line.define_flags()
  flags.DEFINE_string(
    'run', RUN, 'The gin file of the run; it includes het_plugin/gin/runs/temperature.gin.'
  )
  flags.DEFINE_list(
    'method',
    [temperature.BASELINE],
    f'all, or some of {", ".join(temperature.METHODS)}, each with all its rows of table 13; or '
    f'single rows: {", ".join(row for row in temperature.ROWS if ":" in row)}.',
  )
  flags.DEFINE_list('grid', list(map(str, temperature.GRID)), 'Temperatures of the grid search.')
  flags.DEFINE_integer('rounds', 6, 'Of Bayesian optimization.', lower_bound=1)
  flags.DEFINE_integer(
    'trials_per_round', 5, 'Trainings of a round of Bayesian optimization.', lower_bound=1
  )
  flags.DEFINE_integer('replications', 3, 'Of everything, with the seeds 0, 1, ...', lower_bound=1)
  flags.DEFINE_string('output_dir', 'runs/temperature', 'Where everything goes.')
  flags.DEFINE_string('json', None, 'Another place for results.json.')


def parse_grid(values: Sequence[str]) -> list[float]:
  """Raises ValueError for what is no temperature in the range that is searched."""
  low, high = temperature.BOUNDS
  try:
    grid = [float(value) for value in values]
  except ValueError as error:
    raise ValueError(f'--grid={",".join(values)} must be numbers') from error
  if not grid or not all(low <= tau <= high for tau in grid):
    raise ValueError(f'--grid={",".join(values)} must be temperatures in [{low}, {high}]')
  return grid


def report(rows: Sequence[Mapping[str, Any]], output_dir: Path) -> str:
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
      title: runs_lib.curves(run_files.read_jsonl(folder / 'metrics.jsonl'))
      for title, folder in folders.items()
    }
    curves = reporting.curves_png(lines)
    (output_dir / 'curves.png').write_bytes(curves)
    figures.append(
      reporting.Figure(
        curves,
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
      'NLL and prec@1: of the test set, which neither training nor the choice of tau saw, but for '
      '(2 folds), where it chose tau. Validation NLL: of the set that chose tau.',
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
  """{title: (tau, test NLL)}, means over replications: by tau the trials of a search, of the others
  where they ended. A retrained one is left out where its search has a line already.
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


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  registry.register_trainer()
  with command_line.one_sentence_errors():
    methods = temperature.parse_methods(flags.FLAGS.method)
    grid = parse_grid(flags.FLAGS.grid)
    if any(row.startswith('bayesian') for row in methods):
      vizier_suggestions.check_installed()
    output_dir = Path(flags.FLAGS.output_dir)
    base = runs_lib.Run(
      [flags.FLAGS.run, *flags.FLAGS.gin_file],
      flags.FLAGS.gin_bindings,
      flags.FLAGS.gin_search_paths,
    )
    outcomes = {row: [] for row in methods}
    with compilation_cache.in_directory(output_dir):
      for seed in range(flags.FLAGS.replications):
        study = temperature.Study(
          base,
          output_dir / f'seed_{seed}',
          seed,
          grid,
          flags.FLAGS.rounds,
          flags.FLAGS.trials_per_round,
          str(output_dir.absolute() / compilation_cache.FOLDER),
        )
        for number, row in enumerate(methods, 1):
          logging.info(
            '=== %s (row %d of %d, replication %d of %d)',
            *(temperature.ROWS[row].title, number, len(methods)),
            *(seed + 1, flags.FLAGS.replications),
          )
          outcomes[row].append(study.outcome(row).as_json())
        rows = [temperature.table_row(row, outcomes[row]) for row in methods]
        table = report(rows, output_dir)
    if flags.FLAGS.json:
      reporting.write_json(temperature.with_p_values(rows), flags.FLAGS.json)
  print(f'\n{table}\n\nThe same with plots: {output_dir / "index.html"}')


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
