"""Time and FLOPs of a whole training step of contrastive HET-XL, relative to DET.

    python benchmarks/contrastive_step.py [--samples 1,4] [--json OUT]

The step is both towers, the loss (`contrastive_nll`), its gradient and AdamW, as the trainer
compiles them. Seconds are medians of steps that are timed in turns. FLOPs are those of matrix
products, counted from the program. The default is ViT-S/16 at 224 x 224 with text tower S and 16
tokens, which takes three minutes on two CPU cores. With larger towers the relative cost of HET-XL
is smaller.
"""

import os

# Read when JAX is first imported.
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=1')

import jax
import jax.numpy as jnp
import numpy as np
from command_line import integers, make_parser, report
from integrator import time_in_turns

from het_plugin.backbones import text_transformer, vit
from het_plugin.heads import ContrastiveDet, ContrastiveHetXL
from het_plugin.integrate import Integrator
from het_plugin.models import ContrastiveModel
from het_plugin.training import flops, optimizers
from het_plugin.training import step as step_lib
from het_plugin.training.state import TrainState


class Step:
  """A compiled training step with its state."""

  def __init__(self, args, head, num_samples):
    dtype = jnp.dtype(args.dtype)
    sizes = {'width': args.width, 'depth': args.depth, 'mlp_dim': args.width and 4 * args.width}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    model = ContrastiveModel(
      vit(args.variant, dtype=dtype, pooling='gap', **sizes),
      text_transformer(args.text_variant, vocab_size=args.vocab_size, dtype=dtype, **sizes),
      head,
      optimizers.adamw(1e-4, weight_decay=1e-4, clip_norm=1.0),
      Integrator(num_samples=num_samples),
    )
    rng = np.random.default_rng(0)
    image = rng.normal(size=(args.batch, args.image_size, args.image_size, 3))
    self._batch = {
      'image': jnp.asarray(image, jnp.float32),
      'text': jnp.asarray(rng.integers(2, args.vocab_size, (args.batch, args.tokens)), jnp.int32),
      'index': jnp.arange(args.batch),
      'mask': jnp.ones(args.batch),
    }
    shapes = {name: x.shape for name, x in self._batch.items()}

    def init():
      variables = model.get_initial_variables(jax.random.key(0), shapes)
      return TrainState.create(model.optimizer_def, variables)

    def step(state, batch):
      rng = jax.random.fold_in(jax.random.key(1), state.step)
      grads, metrics = step_lib.accumulate_grads_microbatched(model, state.params, batch, rng, None)
      state, metrics = step_lib.apply_grads(state, grads, metrics)
      return state, metrics['loss'].compute()

    self._state = jax.jit(init)()
    traced = jax.jit(step, donate_argnums=0).trace(self._state, self._batch)
    self.flops = flops.count_flops(traced.jaxpr.jaxpr)
    self._compiled = traced.lower().compile()

  def __call__(self):
    self._state, loss = self._compiled(self._state, self._batch)
    if not np.isfinite(loss):
      raise FloatingPointError(f'the loss is {loss}')
    return loss


def compare(args, num_samples):
  """One row: HET-XL with S samples and DET."""
  det = Step(args, ContrastiveDet(), 1)
  het_xl = Step(args, ContrastiveHetXL(num_factors=args.factors), num_samples)
  seconds, det_seconds = time_in_turns([het_xl, det], (), args.repeats)
  return {
    'head': 'het_xl',
    's': num_samples,
    'b': args.batch,
    'variant': args.variant,
    'seconds': seconds,
    'det_seconds': det_seconds,
    'time_ratio': seconds / det_seconds,
    'flops_ratio': het_xl.flops / det.flops,
  }


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--variant', default='S/16', help='of the image tower')
  parser.add_argument('--text_variant', default='S', help='of the text tower')
  parser.add_argument('--width', type=int, help='of both towers; default: as the variants')
  parser.add_argument('--depth', type=int, help='of both towers; default: as the variants')
  parser.add_argument('--image_size', type=int, default=224, help='in pixels')
  parser.add_argument('--tokens', type=int, default=16, help='tokens L per text')
  parser.add_argument('--vocab_size', type=int, default=32_000, help='number of token ids')
  parser.add_argument('--batch', type=int, default=16, help='batch size B')
  parser.add_argument('--factors', type=int, default=15, help='factors R')
  parser.add_argument('--samples', type=integers, default=[1], help='values of S')
  parser.add_argument('--dtype', default='float32', help='of the activations')
  parser.add_argument('--repeats', type=int, default=9, help='timed turns')
  args = parser.parse_args()
  rows = [compare(args, num_samples) for num_samples in args.samples]
  report(args.json, rows)
  for row in rows:
    print(f'HET-XL with S = {row["s"]} takes {row["time_ratio"]:.3f} times as long as DET.')


if __name__ == '__main__':
  main()
