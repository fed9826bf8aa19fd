"""Images per second of a tower's representation, compared with timm and transformers with the same
parameters.

    pip install torch timm transformers    # not needed by the project
    python -m benchmarks.towers [--json OUT] [--width 384 --depth 12 --batch 32]

All compute the pre-logits of a ViT with patches of 16 pixels in float32 from prepared images of 224
pixels; they take turns, and the median of --turns counts. The default is ViT-S/16.
"""

import jax
import numpy as np
import timm
import torch
import transformers
from flax import traverse_util

from benchmarks.command_line import add_clock, make_parser, report
from benchmarks.integrator import time_in_turns
from het_plugin import weights
from het_plugin.backbones import ViT


def timm_side(args):
  """A model, and a function from pixels [B, C, H, W] to its representation."""
  model = timm.models.VisionTransformer(
    patch_size=16,
    embed_dim=args.width,
    depth=args.depth,
    num_heads=args.width // 64,
    num_classes=0,
  ).eval()
  return model, model


def transformers_side(args):
  config = transformers.ViTConfig(
    hidden_size=args.width,
    num_hidden_layers=args.depth,
    num_attention_heads=args.width // 64,
    intermediate_size=4 * args.width,
  )
  model = transformers.ViTModel(config, add_pooling_layer=False).eval()
  return model, lambda pixels: model(pixel_values=pixels).last_hidden_state[:, 0]


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--width', type=int, default=384)
  parser.add_argument('--depth', type=int, default=12)
  parser.add_argument('--batch', type=int, default=32)
  parser.add_argument('--turns', type=int, default=5)
  add_clock(parser)
  args = parser.parse_args()
  image = np.random.default_rng(0).uniform(-1, 1, (args.batch, 224, 224, 3)).astype(np.float32)
  report(args.json, [compare(args, image, side) for side in (timm_side, transformers_side)])


def compare(args, image, side):
  theirs, represent = side(args)
  arrays = {name: x.numpy() for name, x in theirs.state_dict().items()}
  epsilon = next(x.eps for x in theirs.modules() if isinstance(x, torch.nn.LayerNorm))
  config = {'image_mean': [0.5] * 3, 'image_std': [0.5] * 3, 'layer_norm_eps': epsilon}
  tower = weights.read_tower(arrays, config)
  params = traverse_util.unflatten_dict(dict(tower.params), sep='/')['backbone']
  params = jax.device_put(params)
  model = ViT(**tower.settings)
  ours = jax.jit(lambda params, image: model.apply({'params': params}, image)[0])
  pixels = torch.tensor(image.transpose(0, 3, 1, 2)).contiguous()

  def run_ours():
    return np.asarray(ours(params, image))

  def run_theirs():
    with torch.inference_mode():
      return represent(pixels).numpy()

  difference = np.abs(run_ours() - run_theirs()).max()  # compiles, too
  seconds = time_in_turns((run_ours, run_theirs), (), args.turns, args.clock)
  ours_rate, theirs_rate = (args.batch / x for x in seconds)
  return {
    'project': side.__name__.removesuffix('_side'),
    'width': args.width,
    'depth': args.depth,
    'batch': args.batch,
    'ours_images_per_second': ours_rate,
    'theirs_images_per_second': theirs_rate,
    'ratio': ours_rate / theirs_rate,
    'max_difference': float(difference),
  }


if __name__ == '__main__':
  main()
