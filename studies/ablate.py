"""Runs an ablation: trains its cells with every seed and prints one table with standard errors.

    python -m studies.ablate --list
    python -m studies.ablate heads --output_dir=runs/ablations/heads --json=heads.json

Give the name of an ablation from the list, or a gin file (studies/README.md). --gin.NAME=VALUE goes
to every run, after the cell's own settings; --gin.Ablation.NAME=VALUE goes to the ablation, and
--gin.ExampleNLL.NAME=VALUE to its analysis. To continue after an interruption, run the command
again: finished runs are not trained again.

The output directory gets results.json, results.txt, index.html, its plots as .png files, and
a folder per run with its checkpoints, metrics.jsonl and config.gin. The results are printed and
written after every seed. Exit codes: 0 done (a run that was not finite has NaN as its metrics); 2 a
setting is wrong, or no run is left to choose; 42 stopped by SIGTERM with a checkpoint saved: start
it again.
"""

from het_plugin.system import stopping

if __name__ == '__main__':
  stopping.install()  # the imports below take seconds

import dataclasses
import sys
from pathlib import Path
from typing import ClassVar

from het_plugin.cli import command_line
from het_plugin.cli.settings import Bindings, JsonFile, Repeated
from het_plugin.system import run_files
from het_plugin.system.ranges import Seeds
from studies import study


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Bindings, JsonFile):
  """What of an ablation is run.

  Attributes:
    list: Prints the names of the ablations.
    output_dir: Where runs and results go. Default: runs/ablations/NAME.
    seeds: Seeds to use instead of those of the ablation.
    cell: Label of a cell to compare; repeatable. Default: all.
    json: Another place for results.json.
  """

  takes_words: ClassVar[bool] = True

  list: bool = False
  output_dir: str | None = None
  seeds: Seeds | None = None
  cell: Repeated[str] = ()
  allow_imports: tuple[str, ...] = ('studies',)  # of its own runs


def run(settings: Settings) -> None:
  """Runs what is missing, and writes the results after every seed."""
  study.check_folder()
  if settings.list:
    print(study.listing())
    return
  if len(settings.words) != 1:
    given = f', not {" ".join(settings.words)!r}' if settings.words else ''
    raise ValueError(f'name one ablation{given}: {", ".join(study.names())}')
  (name,) = settings.words
  own, of_runs = study.split_bindings(settings.gin_bindings)
  chosen = study.load(name, own, settings.gin_search_paths)
  named = settings.output_dir or f'runs/ablations/{Path(name).stem}'
  output_dir = run_files.local_folder('output_dir', named)
  request = study.Request(
    output_dir, of_runs, settings.gin_search_paths, settings.seeds, settings.cell or None
  )
  for report in chosen.run(request):
    print(f'\n{report.title}\n')
    report.write('studies.ablate', json=settings.json, output_dir=output_dir)


if __name__ == '__main__':
  command_line.run_command(sys.modules[__name__])
