"""Trains every head for the same steps on rendered characters and compares the results.

    python -m het_plugin.quickstart --output_dir=runs/quickstart

Complete runs are not trained again, and interrupted runs continue. The output directory gets
results.json (a row per head), results.txt, index.html and its plots as .png files. It also gets a
run directory per head with checkpoints, metrics.jsonl, event files, logs and config.gin.

Exit codes: 0 done; 2 a setting is wrong; 3 a step was not finite; 42 stopped by SIGTERM or Ctrl-C
with a checkpoint saved: start it again.
"""

import os

from het_plugin.system import stopping

if __name__ == '__main__':
  stopping.install()  # the imports below take seconds
# On a machine without an accelerator, two virtual devices show the sharding. With LLVM's level 2
# compilation takes three quarters of its time with level 3, JAX's default, and the steps take as
# long. Both flags concern the CPU backend.
os.environ.setdefault(
  'XLA_FLAGS', '--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=2'
)

import time
from collections.abc import Sequence

from absl import flags

from het_plugin.cli import command_line
from het_plugin.config import uses
from het_plugin.experiments import head_comparison, trainings
from het_plugin.experiments.head_comparison import HEADS
from het_plugin.system import run_files

RUN = 'het_plugin/gin/runs/glyphs_quickstart.gin'


def define_flags() -> None:
  command_line.define_flags()
  flags.DEFINE_string('run', RUN, 'The gin file that all heads share.')
  flags.DEFINE_list('heads', list(HEADS), f'Heads to train, from {",".join(HEADS)}.')
  flags.DEFINE_string('output_dir', 'runs/quickstart', 'Where everything goes.')
  flags.DEFINE_string('json', None, 'A second copy of results.json.')


def main(argv: Sequence[str]) -> None:
  import gin  # not at the top: het_plugin.config says how to install it

  settings = flags.FLAGS
  heads = flags.FLAGS.heads
  with command_line.one_sentence_errors(argv):
    if unknown := [head for head in heads or [''] if head not in HEADS]:
      raise ValueError(f'--heads={",".join(unknown)} is unknown: choose from {", ".join(HEADS)}')
    output_dir = run_files.local_folder('output_dir', settings.output_dir)
    folders = {head: output_dir / head for head in heads}
    of_heads = {}
    texts = []
    for head, folder in folders.items():
      files = [settings.run, f'het_plugin/gin/heads/{head}.gin', *settings.gin_file]
      of_heads[head] = trainings.Training(files, settings.gin_bindings, settings.gin_search_paths)
      of_heads[head].parse(folder)
      texts.append(gin.config_str())
    uses.check(settings.gin_bindings, *texts)
    rows = []
    trained = {}
    for number, (head, folder) in enumerate(folders.items(), 1):
      print(f'{HEADS[head]} ({number} of {len(folders)}): compiling and training', flush=True)
      start = time.monotonic()
      if step := head_comparison.train_head(head, of_heads[head], folder):
        trained[folder] = step
      rows.append(head_comparison.row(head, folder))
      print(
        f'  NLL {rows[-1]["nll"]:.3f}, precision@1 {rows[-1]["precision_at_1"]:.3f} after '
        f'{rows[-1]["steps"]:,} steps; {time.monotonic() - start:.0f} s',
        flush=True,
      )
    head_comparison.time_steps(trained)
    for row, folder in zip(rows, folders.values(), strict=True):
      row['ms_per_step'] = head_comparison.ms_per_step(folder)
    task = gin.query_parameter('%MIXTURE_OR_TASK_NAME')
    yardsticks = head_comparison.references(task, gin.query_parameter('%EVAL_SPLIT'))
    print()
    report = head_comparison.make_report(rows, folders, yardsticks)
    report.write('het_plugin.quickstart', json=settings.json, output_dir=output_dir)


if __name__ == '__main__':
  command_line.run(main)
