"""How noisy the labels of glyphs_noisy are, and the best results that a classifier can have.

    python -m studies.real_features.glyph_label_noise [--class_set core] [--split validation]

Rows are for all examples of the split, and for its second half, which the ablations report:

    wrong           share of labels that are not the true class
    entropy         mean entropy of the distribution that each label is drawn from, in nats: the
                    lowest NLL that a classifier can have on average
    nll             mean NLL of the labels under that distribution, in nats
    nll_sigmoid     the same with a sigmoid per class: the sum of the binary cross entropies
    precision_at_1  mean probability of the likeliest label: the highest that a classifier can have

Takes seconds on any machine.
"""

import numpy as np
from scipy import special

from benchmarks.command_line import make_parser, report
from het_plugin.data.glyphs import NoisyGlyphSource


def make_row(split, examples, classes, p, labels):
  """One row, from classes and p [N, C], the true class first, and labels [N, 1]."""
  is_label = classes == labels
  likelihood = np.where(is_label, p, 0).sum(1)
  return {
    'split': split,
    'examples': examples,
    'count': len(labels),
    'wrong': float((labels != classes[:, :1]).mean()),
    'entropy': float(special.entr(p).sum(1).mean()),
    'nll': float(-np.log(likelihood).mean()),
    'nll_sigmoid': float(-np.log(np.where(is_label, p, 1 - p)).sum(1).mean()),
    'precision_at_1': float(p.max(1).mean()),
  }


def main():
  parser = make_parser(__doc__)
  parser.add_argument(
    '--class_set', choices=['core', 'full', 'latin'], default='core', help='of glyphs_noisy, ...'
  )
  parser.add_argument(
    '--split', choices=['validation', 'shift'], default='validation', help='split of the task'
  )
  args = parser.parse_args()
  source = NoisyGlyphSource(args.class_set)
  if args.split not in source.info.splits:
    parser.error(f'--class_set={args.class_set} has no split {args.split}: choose validation')
  ids = np.arange(source.info.splits[args.split])
  _, labels = source.read(
    args.split, ids, 8, seed=0
  )  # the images are not used, so they may be small
  drawn = (*source.label_distribution(args.split, ids), labels)
  rows = [
    make_row(args.split, examples, *(x[first:] for x in drawn))
    for examples, first in (('all', 0), ('second half', len(ids) // 2))
  ]
  report(args.json, rows)


if __name__ == '__main__':
  main()
