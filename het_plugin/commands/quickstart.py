"""Trains every head for the same steps on rendered characters and compares the results.

    python -m het_plugin.quickstart --output_dir=runs/quickstart

Complete runs are not trained again, and interrupted runs continue. The output directory gets
results.json (a row per head), results.txt, index.html and its plots as .png files. It also gets a
run directory per head with checkpoints, metrics.jsonl, event files, logs and config.gin.

Exit codes: 0 done; 2 a setting is wrong; 3 a step was not finite; 42 stopped by SIGTERM or Ctrl-C
with a checkpoint saved: start it again.
"""

import os

# On a machine without an accelerator, two virtual devices show the sharding. With LLVM's level 2
# compilation takes three quarters of its time with level 3, JAX's default, and the steps take as
# long. Both flags concern the CPU backend.
os.environ.setdefault(
  'XLA_FLAGS', '--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=2'
)

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Literal, get_args

from het_plugin import reporting
from het_plugin.cli.settings import Gin, ReportFolder
from het_plugin.system.ranges import NOT_EMPTY

Head = Literal['det', 'det_learned_tau', 'het', 'het_h', 'het_xl']
RUN = 'het_plugin/gin/runs/glyphs_quickstart.gin'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(ReportFolder, Gin):
  """What is trained.

  Attributes:
    run: The gin file that all heads share.
    heads: Heads to train, from det,det_learned_tau,het,het_h,het_xl.
    output_dir: Where everything goes.
  """

  run: str = RUN
  heads: Annotated[tuple[Head, ...], NOT_EMPTY] = get_args(Head)
  output_dir: str = 'runs/quickstart'


def run(settings: Settings) -> reporting.Report:
  """A row per head."""
  # Not at the top, because --help needs none of them.
  import gin
  from het_plugin.config import uses
  from het_plugin.experiments import head_comparison, trainings

  folders = {str(head): Path(settings.output_dir) / head for head in settings.heads}
  of_heads = {}
  texts = []
  for head, folder in folders.items():
    files = [settings.run, f'het_plugin/gin/heads/{head}.gin', *settings.gin_file]
    bindings = settings.gin_bindings, settings.gin_search_paths
    of_heads[head] = trainings.Training(files, *bindings)
    of_heads[head].parse(folder)
    texts.append(gin.config_str())
  uses.check(settings.gin_bindings, *texts)
  rows = []
  trained = {}
  for number, (head, folder) in enumerate(folders.items(), 1):
    print(
      f'{head_comparison.HEADS[head]} ({number} of {len(folders)}): compiling and training',
      flush=True,
    )
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
  return head_comparison.make_report(rows, folders, yardsticks)
