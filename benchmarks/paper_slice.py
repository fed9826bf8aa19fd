"""Memory and FLOPs of each head on the paper's own slice, 64 TPU v3 chips, from the compiler.

    python -m benchmarks.paper_slice [--backbones vit_l_32] [--meshes 32x4,128x1] [--json OUT]

Compiles the training step for JFT-4B's 29,593 classes, batch 4096, R = 50 and the exact sigmoid
link on v3:8x8, which has 128 devices. Section 1 of Collier et al. (2023) reports that HET does not
fit there. The last column is the formula of docs/scale.md for what a head adds to DET. Needs libtpu
(the extra 'plan') but no TPU, and two minutes per row on two CPU cores.
"""

import itertools

from benchmarks.command_line import collect, make_parser, names
from het_plugin.planning import worker
from het_plugin.planning.worker import Request

GIB = 2**30
BACKBONES = ('vit_l_32', 'resnet_152')
HEADS = ('det', 'het', 'het_h', 'het_xl')
RUN = 'het_plugin/gin/runs/jft4b.gin'
# B, K and R of the run, and D of the backbones.
BATCH = 4096
CLASSES = 29_696
FACTORS = 50
DIMS = {'vit_l_32': 1024, 'resnet_152': 2048}


def head_flops(head, dim):
  """FLOPs that a head adds to the training step of DET with the exact sigmoid link, at most.

  They are the covariance, and for HET-XL the projection of the factors by W, each forward and
  backward; the backward pass projects all but the last group of factors again.
  """
  if head == 'det':
    return 0
  covariance = 2 * 6 * BATCH * dim * (CLASSES if head == 'het' else dim)
  projected = BATCH * (6 * (FACTORS + 1) + 2 * FACTORS) * dim * CLASSES if head == 'het_xl' else 0
  return covariance + projected


def meshes(text):
  return [[int(size) for size in mesh.split('x')] for mesh in text.split(',')]


def make_row(args, backbone, mesh, head):
  bindings = [f"{backbone.partition('_')[0]}.dtype = 'bfloat16'", *args.gin]
  plan = worker.compile_in_process(
    Request(
      gin_files=[
        RUN,
        f'het_plugin/gin/models/{backbone}.gin',
        f'het_plugin/gin/heads/{head}.gin',
      ],
      gin_bindings=bindings,
      gin_search_paths=['.'],
      topology=args.topology,
      mesh=mesh,
      steps=('train',),
    )
  )
  peak = plan['peak_bytes_per_device']
  return {
    'backbone': backbone,
    'topology': args.topology,
    'mesh': 'x'.join(map(str, mesh)),
    'head': head,
    'peak_gib': peak and peak / GIB,
    'hbm_gib': plan['hbm_bytes_per_device'] / GIB,
    'fits': plan['fits'],
    'tflop': plan['flops_per_device'] / 1e12,
    'all_reduced_gib': sum(c['bytes'] for c in plan['collectives'] or ()) / GIB,
    'head_tflop': head_flops(head, DIMS[backbone]) / plan['num_devices'] / 1e12,
  }


def main():
  parser = make_parser(__doc__)
  parser.add_argument(
    '--backbones', type=names(BACKBONES), default=['vit_l_32'], help=','.join(BACKBONES)
  )
  parser.add_argument('--heads', type=names(HEADS), default=list(HEADS), help=','.join(HEADS))
  parser.add_argument(
    '--meshes',
    type=meshes,
    default=[[32, 4], [128, 1]],
    help='devices along the data and the model axis',
  )
  parser.add_argument('--topology', default='v3:8x8', help='as in het_plugin.plan')
  parser.add_argument('--gin', action='append', default=[], help='a gin binding for all rows')
  args = parser.parse_args()
  cases = list(itertools.product(args.backbones, args.meshes, args.heads))
  rows = collect(args.json, len(cases), (make_row(args, *case) for case in cases))
  first = {name: rows[0][name] for name in ('backbone', 'mesh')}
  peaks = {row['head']: row['peak_gib'] for row in rows if first.items() <= row.items()}
  if peaks.get('det') and peaks.get('het_xl'):
    ratio = peaks['het_xl'] / peaks['det']
    print(f'{", ".join(first.values())}: HET-XL takes {ratio:.3f} of the memory of DET')


if __name__ == '__main__':
  main()
