"""Tables 6 and 7 of the paper in small: where contrastive HET-XL normalises, and HET-XL beside DET.

    python benchmarks/normalization.py [--steps 600] [--seeds 0,1,2] [--dir DIR] [--json OUT]

Trains gin/runs/lit_glyphs_det.gin, and lit_glyphs_het_xl.gin with both values of pre_normalization
and of post_normalization, with every seed. Prints zero-shot accuracy on characters trained on and
on ones never shown: the mean over seeds, its standard error, and the p-value of the two-sample
unequal-variance t-test against the first cell, DET. With --dir runs are kept, and one that was
interrupted goes on. Five runs a seed; on two CPU cores each takes ten minutes with 600 steps, one
with 20. --cells chooses: det, and HET-XL that normalises in none, pre, post (before, after the
noise) or both places.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from command_line import integers, names, print_table, write_json

from het_plugin.evaluation import comparison

HEAD = 'ContrastiveHetXL'
# {cell: (its run, where its head normalises)}
CELLS = {
  'det': ('lit_glyphs_det', ()),
  **{
    name: ('lit_glyphs_het_xl', (f'pre_normalization={pre}', f'post_normalization={post}'))
    for name, pre, post in (
      ('none', False, False),
      ('post', False, True),
      ('pre', True, False),
      ('both', True, True),
    )
  },
}
MEASURES = ('glyphs_core', 'glyphs_heldout')


def train(cell, seed, args, model_dir):
  """{data set: top-1} at the end of a run."""
  run, settings = CELLS[cell]
  command = [sys.executable, '-m', 'het_plugin.train', f'--gin_file=het_plugin/gin/runs/{run}.gin']
  command += [f"--gin.MODEL_DIR='{model_dir}'", f'--gin.RANDOM_SEED={seed}']
  command += [f'--gin.{name}_PERIOD={args.steps}' for name in ('EVAL', 'SAVE')]
  command += [f'--gin.TRAIN_STEPS={args.steps}', f'--gin.WARMUP_STEPS={args.steps // 6}']
  command += [f'--gin.{binding}' for binding in args.gin]
  command += [f'--gin.{HEAD}.{setting}' for setting in settings]
  devices = {'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}
  subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=devices | os.environ)
  records = map(json.loads, (model_dir / 'zeroshot.jsonl').read_text().splitlines())
  return {r['dataset']: r['top1'] for r in records if r['step'] == args.steps and 'top1' in r}


def summarize(name, found, det):
  """A row: of each data set mean, and of several seeds the standard error and p against `det`."""
  row = {'cell': name}
  for measure in MEASURES:
    values = [top1[measure] for top1 in found]
    group = comparison.group_mean(values)
    p = comparison.welch_p(values, [top1[measure] for top1 in det])
    row |= {measure: group.mean, f'{measure}_error': group.stderr, f'{measure}_p': p}
    row[f'{measure}_runs'] = values
  return row


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--steps', type=int, default=600, help='training steps')
  parser.add_argument('--seeds', type=integers, default=[0, 1, 2], help='by comma')
  parser.add_argument('--cells', type=names(CELLS), default=list(CELLS), help=','.join(CELLS))
  parser.add_argument('--gin', action='append', default=[], metavar='NAME=VALUE', help='a binding')
  parser.add_argument('--dir', type=Path, help='keeps the runs')
  parser.add_argument('--json', type=Path, help='write the rows here')
  args = parser.parse_args()
  with contextlib.ExitStack() as stack:
    folder = args.dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
    found = {}
    for cell in args.cells:
      found[cell] = [train(cell, seed, args, folder / cell / f'seed_{seed}') for seed in args.seeds]
      print(f'{cell}: {found[cell]}', flush=True)
  first = args.cells[0]  # what the others are compared with
  rows = [summarize(cell, of_cell, found[first]) for cell, of_cell in found.items()]
  keys = [f'{measure}{kind}' for measure in MEASURES for kind in ('', '_error', '_p')]
  print_table(
    ['zero-shot top-1', *keys],
    [[row['cell'], *('' if row[key] is None else row[key] for key in keys)] for row in rows],
  )
  write_json(args.json, rows)
  for row in rows[1:]:
    gain = row[MEASURES[0]] - rows[0][MEASURES[0]]
    print(f'{row["cell"]}: {gain:+.4f} {MEASURES[0]} accuracy over {first}.')


if __name__ == '__main__':
  main()
