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

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from het_plugin.cli import command_line
from het_plugin.cli.settings import Bindings
from het_plugin.system import run_files
from studies import study


def define_flags() -> None:
  Bindings.define_flags()
  flags.FLAGS.set_default('allow_imports', ['studies'])  # of its own runs
  flags.DEFINE_bool('list', False, 'Prints the names of the ablations.')
  flags.DEFINE_string(
    'output_dir', None, 'Where runs and results go. Default: runs/ablations/NAME.'
  )
  flags.DEFINE_list('seeds', None, 'Seeds to use instead of those of the ablation.')
  flags.DEFINE_multi_string('cell', None, 'Label of a cell to compare; repeatable. Default: all.')
  flags.DEFINE_string('json', None, 'Another place for results.json.')


def main(argv: Sequence[str]) -> None:
  with command_line.one_sentence_errors():
    study.check_folder()
    if flags.FLAGS.list:
      print(study.listing())
      return
    if len(argv) != 2:
      given = f', not {" ".join(argv[1:])!r}' if argv[1:] else ''
      raise ValueError(f'name one ablation{given}: {", ".join(study.names())}')
    own, of_runs = study.split_bindings(flags.FLAGS.gin_bindings)
    chosen = study.load(argv[1], own, flags.FLAGS.gin_search_paths)
    named = flags.FLAGS.output_dir or f'runs/ablations/{Path(argv[1]).stem}'
    output_dir = run_files.local_folder('output_dir', named)
    seeds = flags.FLAGS.seeds
    request = study.Request(
      output_dir,
      of_runs,
      flags.FLAGS.gin_search_paths,
      None if seeds is None else list(map(int, seeds)),
      flags.FLAGS.cell,
    )
    for report in chosen.run(request):
      print(f'\n{report.title}\n')
      report.write('studies.ablate', json=flags.FLAGS.json, output_dir=output_dir)


if __name__ == '__main__':
  command_line.run(main)
