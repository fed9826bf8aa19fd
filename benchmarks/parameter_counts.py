"""Parameter counts of the paper's models next to those of its table 3.

    python benchmarks/parameter_counts.py [--json OUT]

Heads have the parameters of the reference implementation (factor_bias) and R = 50. A learned
temperature is one parameter, too few to show. Only shapes are computed: seconds on any machine.
"""

import math

import jax
import jax.numpy as jnp
from command_line import make_parser, report

from het_plugin.backbones import resnet, vit
from het_plugin.heads import Det, Het, HetH, HetXL

CLASSES = {'JFT-300M': 18_291, 'ImageNet-21k': 21_843, 'JFT-4B': 29_593}
BACKBONES = {
  'ResNet152x1': resnet('152x1'),
  # With its biased representation layer before the head (appendix P).
  'ViT-L/32': vit('L/32', representation_size=1024),
}
HEADS = {'DET': Det, 'HET': Het, 'HET-H': HetH, 'HET-XL': HetXL}
# The column #Params of table 3 in millions, in the order of CLASSES.
TABLE_3 = {
  ('ResNet152x1', 'DET'): (95.6, 102.9, 118.8),
  ('ResNet152x1', 'HET'): (171.5, 193.5, 241.6),
  ('ResNet152x1', 'HET-H'): (104.1, 111.4, 127.2),
  ('ResNet152x1', 'HET-XL'): (104.1, 111.4, 127.2),
  ('ViT-L/32', 'DET'): (325.3, 328.9, 336.9),
  ('ViT-L/32', 'HET'): (363.7, 374.8, 399.1),
  ('ViT-L/32', 'HET-H'): (327.5, 331.1, 339.0),
  ('ViT-L/32', 'HET-XL'): (327.5, 331.1, 339.0),
}


def count(backbone, head):
  """The number of parameters of a backbone and a head."""
  image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
  phi = jax.ShapeDtypeStruct((1, backbone.pre_logits_dim), jnp.float32)
  params = [
    jax.eval_shape(m.init, jax.random.key(0), x) for m, x in ((backbone, image), (head, phi))
  ]
  return sum(math.prod(x.shape) for tree in params for x in jax.tree.leaves(tree['params']))


def make_rows():
  rows = []
  for (backbone, head), printed in TABLE_3.items():
    for (dataset, num_classes), millions in zip(CLASSES.items(), printed, strict=True):
      extra = {} if head == 'DET' else {'factor_bias': True}
      module = HEADS[head](num_classes, class_multiple=1, **extra)
      num_params = count(BACKBONES[backbone], module)
      rows.append(
        dict(
          backbone=backbone,
          dataset=dataset,
          head=head,
          num_params=num_params,
          printed_millions=millions,
          matches=round(num_params / 1e6, 1) == millions,
        )
      )
  return rows


def main():
  args = make_parser(__doc__).parse_args()
  rows = make_rows()
  report(args.json, rows)
  print(f'{sum(row["matches"] for row in rows)} of {len(rows)} are as printed in table 3')


if __name__ == '__main__':
  main()
