"""Compares ways to choose the temperature tau (Collier et al. 2023, section 4 and appendix G).

    python -m studies.tune --method=all --output_dir=runs/temperature

Runs the trainings of each method with every seed and prints them as in table 13. To continue, or to
add methods, run the same command again. Complete trainings are not repeated. The output directory
gets results.json (one row per method), results.txt, index.html, its plots as .png files, and a
folder per seed with a run directory per training. The table is printed and written after every
seed.

Exit codes: 0 done; 2 a setting is wrong; 42 stopped by SIGTERM or Ctrl-C with a checkpoint saved:
start it again.
"""

from het_plugin.system import stopping

if __name__ == '__main__':
  stopping.install()  # the imports below take seconds

from collections.abc import Sequence

from absl import flags, logging

from het_plugin.cli import command_line
from het_plugin.cli.settings import Gin
from het_plugin.experiments import trainings
from het_plugin.system import run_files
from het_plugin.training import compilation_cache
from studies import study as study_lib
from studies.temperature import methods

RUN = 'studies/temperature/gin/temperature_glyphs.gin'
_OF_SEARCHES = {'grid': 'grid', 'rounds': 'bayesian', 'trials_per_round': 'bayesian'}


def define_flags() -> None:
  Gin.define_flags()
  flags.DEFINE_string(
    'run', RUN, 'The gin file of the run; it includes studies/temperature/gin/temperature.gin.'
  )
  flags.DEFINE_list(
    'method',
    [methods.BASELINE],
    f'all, or methods with all their rows of table 13: {", ".join(methods.METHODS)}; or single '
    f'rows: {", ".join(row for row in methods.ROWS if ":" in row)}.',
  )
  flags.DEFINE_list('grid', list(map(str, methods.GRID)), 'Temperatures of the grid search.')
  flags.DEFINE_integer('rounds', 6, 'Rounds of Bayesian optimization.', lower_bound=1)
  flags.DEFINE_integer(
    'trials_per_round', 5, 'Trainings per round of Bayesian optimization.', lower_bound=1
  )
  flags.DEFINE_integer('replications', 3, 'Number of seeds: 0, 1, ...', lower_bound=1)
  flags.DEFINE_string('output_dir', 'runs/temperature', 'Where everything goes.')
  flags.DEFINE_string('json', None, 'Another place for results.json.')


def main(argv: Sequence[str]) -> None:
  with command_line.one_sentence_errors(argv):
    study_lib.check_folder()
    rows = methods.parse_methods(flags.FLAGS.method)
    for flag, method in _OF_SEARCHES.items():
      if not any(row.startswith(method) for row in rows):
        command_line.check_unused([flag], f'--method={",".join(rows)}: add {method}')
    grid = methods.parse_grid(flags.FLAGS.grid)
    output_dir = run_files.local_folder('output_dir', flags.FLAGS.output_dir)
    base = trainings.Training(
      [flags.FLAGS.run, *flags.FLAGS.gin_file],
      flags.FLAGS.gin_bindings,
      flags.FLAGS.gin_search_paths,
    )
    rounds = flags.FLAGS.rounds
    trials = flags.FLAGS.trials_per_round
    studies = [
      methods.Study(base, output_dir / f'seed_{seed}', seed, grid, rounds, trials)
      for seed in range(flags.FLAGS.replications)
    ]
    studies[0].check_used(rows)
    outcomes = {row: [] for row in rows}
    with compilation_cache.in_directory(output_dir):
      for study in studies:
        for number, row in enumerate(rows, 1):
          logging.info(
            '=== %s (row %d of %d, replication %d of %d)',
            methods.ROWS[row].title,
            number,
            len(rows),
            study.seed + 1,
            len(studies),
          )
          outcomes[row].append(study.outcome(row))
        report = methods.make_report(methods.table(outcomes), output_dir)
        report.write('studies.tune', json=flags.FLAGS.json, output_dir=output_dir)


if __name__ == '__main__':
  command_line.run(main)
