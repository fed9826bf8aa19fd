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

import dataclasses
import sys
from typing import Annotated

from absl import logging

from het_plugin.cli import command_line
from het_plugin.cli.settings import Gin, JsonFile
from het_plugin.experiments import trainings
from het_plugin.system import run_files
from het_plugin.system.ranges import NOT_EMPTY, Count
from het_plugin.training import compilation_cache
from studies import study as study_lib
from studies.temperature import methods

RUN = 'studies/temperature/gin/temperature_glyphs.gin'
_OF_SEARCHES = {'grid': 'grid', 'rounds': 'bayesian', 'trials_per_round': 'bayesian'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, JsonFile):
  """What is compared.

  Attributes:
    run: The gin file of the run; it includes studies/temperature/gin/temperature.gin.
    method: all, or methods with all their rows of table 13: grid, bayesian, luketina,
      simple_gradient, simple_training; or single rows: grid:validation, grid:2folds, grid:retrain,
      bayesian:validation, bayesian:2folds, bayesian:retrain, luketina:validation, luketina:12.5%,
      luketina:25%, simple_gradient:validation, simple_gradient:12.5%, simple_gradient:25%.
    grid: Temperatures of the grid search.
    rounds: Rounds of Bayesian optimization.
    trials_per_round: Trainings per round of Bayesian optimization.
    replications: Number of seeds: 0, 1, ...
    output_dir: Where everything goes.
    json: Another place for results.json.
  """

  run: str = RUN
  method: tuple[str, ...] = (methods.BASELINE,)
  grid: Annotated[tuple[methods.Temperature, ...], NOT_EMPTY] = methods.GRID
  rounds: Count = 6
  trials_per_round: Count = 5
  replications: Count = 3
  output_dir: str = 'runs/temperature'


def run(settings: Settings) -> None:
  """Runs what is missing, and writes the table after every seed."""
  study_lib.check_folder()
  rows = methods.parse_methods(settings.method)
  for flag, method in _OF_SEARCHES.items():
    if not any(row.startswith(method) for row in rows):
      settings.refuse([flag], f'--method={",".join(rows)}: add {method}')
  methods.check_grid(settings.grid)
  output_dir = run_files.local_folder('output_dir', settings.output_dir)
  files, bindings, search_paths = settings.gin
  base = trainings.Training([settings.run, *files], bindings, search_paths)
  searches = settings.grid, settings.rounds, settings.trials_per_round
  studies = [
    methods.Study(base, output_dir / f'seed_{seed}', seed, *searches)
    for seed in range(settings.replications)
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
      report.write('studies.tune', json=settings.json, output_dir=output_dir)


if __name__ == '__main__':
  command_line.run_command(sys.modules[__name__])
