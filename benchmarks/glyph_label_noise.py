"""How noisy the labels of glyphs_noisy are, and the best that a classifier can do on them.

    python benchmarks/glyph_label_noise.py [--class_set core] [--split validation] [--json OUT]

Of all examples of the split, and of the second half, which the ablations report:
  wrong     labels that are not the true class
  entropy   of what the labels are drawn from, nats: a classifier that knows glyph and noise has
            this NLL on average, and none has a lower one
  nll       of the labels under what they are drawn from, nats
  prec@1    of the likeliest label under it, on average: no classifier has a higher one
Seconds on any machine.
"""

import argparse
from pathlib import Path

import numpy as np
from command_line import print_table, write_json
from scipy import special

from het_plugin.data.glyphs import NoisyGlyphSource


def make_row(split, examples, classes, p, labels):
  """Of classes and p [N, C], the true class first, and labels [N, 1]."""
  likelihood = np.where(classes == labels, p, 0).sum(1)
  return {
    'split': split,
    'examples': examples,
    'count': len(labels),
    'wrong': float((labels != classes[:, :1]).mean()),
    'entropy': float(special.entr(p).sum(1).mean()),
    'nll': float(-np.log(likelihood).mean()),
    'precision_at_1': float(p.max(1).mean()),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--class_set',
    choices=['core', 'full'],
    default='core',
    help='glyphs_noisy or glyphs_noisy_full',
  )
  parser.add_argument(
    '--split', choices=['validation', 'shift'], default='validation', help='of that task'
  )
  parser.add_argument('--json', type=Path, help='write the rows here')
  args = parser.parse_args()
  source = NoisyGlyphSource(args.class_set)
  ids = np.arange(source.info.splits[args.split])
  _, labels = source.read(args.split, ids, 8, seed=0)  # the images, of any side, are not looked at
  drawn = (*source.label_distribution(args.split, ids), labels)
  rows = [
    make_row(args.split, examples, *(x[first:] for x in drawn))
    for examples, first in (('all', 0), ('second half', len(ids) // 2))
  ]
  print_table(list(rows[0]), [list(row.values()) for row in rows])
  write_json(args.json, rows)


if __name__ == '__main__':
  main()
