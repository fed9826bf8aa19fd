"""What starting with little noise is worth in a short run: the quick start's heads, twice.

    python benchmarks/initial_noise.py [--scales 1.0,0.1] [--steps 700] [--json OUT]

Trains HET, HET-H and HET-XL with gin/runs/glyphs_quickstart.gin at each initial_noise_scale, of
which 1.0 is the reference implementation's start. Ten minutes on two CPU cores; one with
--steps 20.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from command_line import print_table, write_json

HEADS = {'het': 'Het', 'het_h': 'HetH', 'het_xl': 'HetXL'}


def train(scale: float, args: argparse.Namespace, output_dir: str) -> list[dict]:
  """Rows {head, initial_noise_scale, nll, precision_at_1, ece, tau} of one quick start."""
  command = [sys.executable, '-m', 'het_plugin.quickstart', f'--output_dir={output_dir}']
  command += [f'--heads={",".join(args.heads)}', '--gin.ACTIONS=None']
  command += [f'--gin.{name}_PERIOD={args.steps}' for name in ('EVAL', 'SAVE')]
  command += [f'--gin.TRAIN_STEPS={args.steps}', f'--gin.WARMUP_STEPS={args.steps // 7}']
  command += [f'--gin.{binding}' for binding in args.gin]
  command += [f'--gin.{HEADS[head]}.initial_noise_scale={scale}' for head in args.heads]
  devices = {'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}  # as launch/quickstart.sh
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=devices | os.environ)
  columns = ('head', 'nll', 'precision_at_1', 'ece', 'tau')
  return [
    {'initial_noise_scale': scale} | {name: row[name] for name in columns}
    for row in json.loads(Path(output_dir, 'results.json').read_text())
  ]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--scales', default='1.0,0.1', help='two values of initial_noise_scale')
  parser.add_argument('--heads', default=','.join(HEADS), help=f'some of {",".join(HEADS)}')
  parser.add_argument('--steps', type=int, default=700, help='training steps')
  parser.add_argument('--gin', action='append', default=[], metavar='NAME=VALUE', help='a binding')
  parser.add_argument('--json', type=Path, help='write the rows here')
  args = parser.parse_args()
  args.heads = args.heads.split(',')
  before, after = (float(scale) for scale in args.scales.split(','))
  rows = []
  for scale in (before, after):
    with tempfile.TemporaryDirectory() as output_dir:
      rows += train(scale, args, output_dir)
  print_table(list(rows[0]), [list(row.values()) for row in rows])
  nll = {(row['head'], row['initial_noise_scale']): row['nll'] for row in rows}
  ratios = {head: nll[head, after] / nll[head, before] for head, _ in nll}
  print(
    f'NLL with initial_noise_scale {after:g} over that with {before:g}: '
    + ', '.join(f'{head} {ratio:.3f}' for head, ratio in ratios.items())
  )
  write_json(args.json, {'rows': rows, 'nll_ratio': ratios})


if __name__ == '__main__':
  main()
