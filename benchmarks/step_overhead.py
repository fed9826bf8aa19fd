"""A whole training step of a ViT with each head over the same step with DET, in time and memory.

    python -m benchmarks.step_overhead --variant Ti/32 --classes 2000 --batches 16 [--json OUT]
    python -m benchmarks.step_overhead --heads het,het_h,het_xl --batches 4,8,16 --png grid.png

Forward, backward and AdamW, compiled; seconds are the median of the steps timed in turns with
DET's. Without flags it is ViT-L/32 with K = 21,843 and bfloat16 activations, for an accelerator;
the first line above takes a minute on two CPU cores. With several batch sizes and --png the grid of
Collier et al. (2023), fig. 2: black where the step does not fit in memory.
"""

import itertools
import statistics
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.command_line import add_clock, collect, integers, make_parser, names
from het_plugin.backbones import vit
from het_plugin.heads import Det, Het, HetH, HetXL, LearnedTemperature
from het_plugin.integrate import LINKS, SAMPLERS, Integrator, example_keys
from het_plugin.reporting import grid_png

HEADS = {'het': Het, 'het_h': HetH, 'het_xl': HetXL}


class Model(nn.Module):
  backbone: nn.Module
  head: nn.Module

  def __call__(self, image):
    return self.head(self.backbone(image)[0])


def make_head(args, name):
  shared = {'num_classes': args.classes, 'link': args.link, 'dtype': args.dtype}
  if name == 'det':
    return Det(**shared)
  return HEADS[name](
    **shared,
    num_factors=args.factors,
    temperature=LearnedTemperature(),
    initial_noise_scale=0.1,
  )


class Step:
  """A compiled training step with its state."""

  def __init__(self, args, name, num_samples, batch):
    model = Model(vit(args.variant, dtype=args.dtype, pooling='gap'), make_head(args, name))
    integrator = Integrator(
      num_samples=num_samples, sampler=args.sampler, principal_factors=args.principal_factors
    )
    optimizer = optax.adamw(1e-4)
    rng = np.random.default_rng(0)
    image = rng.normal(size=(batch, args.image_size, args.image_size, 3))
    self.image = jnp.asarray(image, jnp.float32)
    self.label = jnp.asarray(rng.integers(args.classes, size=(batch, 1)), jnp.int32)

    def step(state, image, label):
      params, opt_state, count = state

      def loss(params):
        keys = example_keys(jax.random.fold_in(jax.random.key(0), count), jnp.arange(batch))
        return integrator.nll(model.apply({'params': params}, image), label, keys).mean()

      value, gradient = jax.value_and_grad(loss)(params)
      updates, opt_state = optimizer.update(gradient, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state, count + 1), value

    # A GPU's compiler takes longer for the initialisation than for the step.
    shapes = jax.eval_shape(model.init, jax.random.key(0), self.image)['params']
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = treedef.unflatten(
      0.02 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)
    )
    self.state = params, optimizer.init(params), jnp.int32(0)
    lowered = jax.jit(step, donate_argnums=0).lower(self.state, self.image, self.label)
    self.compiled = lowered.compile()
    self.temp_bytes = self.compiled.memory_analysis().temp_size_in_bytes

  def seconds(self, clock=time.perf_counter):
    start = clock()
    self.state, value = self.compiled(self.state, self.image, self.label)
    if not np.isfinite(jax.block_until_ready(value)):
      raise FloatingPointError(f'the loss is {value}')
    return clock() - start


def make_step(*arguments):
  """The step, or None where it does not fit in memory."""
  try:
    step = Step(*arguments)
    step.seconds()
    return step
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return None


def compare(args, batch):
  """Rows of one batch size, DET's first."""
  det = make_step(args, 'det', 1, batch)
  for name, num_samples in [('det', 0), *itertools.product(args.heads, args.samples)]:
    step = det if name == 'det' else make_step(args, name, num_samples, batch)
    fits = step is not None and det is not None
    turns = range(args.repeats if fits else 0)
    pairs = [(step.seconds(args.clock), det.seconds(args.clock)) for _ in turns]
    seconds, det_seconds = (
      map(statistics.median, zip(*pairs, strict=True)) if fits else (None, None)
    )
    temp, det_temp = (side and side.temp_bytes for side in (step, det))
    yield dict(
      head=name,
      variant=args.variant,
      k=args.classes,
      r=args.factors,
      b=batch,
      s=num_samples,
      sampler=args.sampler,
      seconds=seconds,
      det_seconds=det_seconds,
      time_ratio=seconds / det_seconds if fits else None,
      temp_bytes=temp,
      det_temp_bytes=det_temp,
      memory_ratio=temp / det_temp if fits else None,
    )


GRID = {
  'ms per image': lambda row: row['seconds'] and 1e3 * row['seconds'] / row['b'],
  'temporaries, GiB': lambda row: row['temp_bytes'] and row['temp_bytes'] / 2**30,
}


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--heads', type=names(HEADS), default=['het_xl'], help=','.join(HEADS))
  parser.add_argument(
    '--samples', type=integers, default=[64], help='values of S; a sigmoid is exact'
  )
  parser.add_argument('--batches', type=integers, default=[64], help='batch sizes B')
  parser.add_argument('--variant', default='L/32', help='ViT size and patch')
  parser.add_argument('--image_size', type=int, default=224, help='pixels a side')
  parser.add_argument('--classes', type=int, default=21843, help='classes K')
  parser.add_argument('--factors', type=int, default=50, help='factors R')
  parser.add_argument('--link', choices=LINKS, default='softmax', help='of the loss')
  parser.add_argument('--sampler', choices=SAMPLERS, default='sobol', help='of the noise')
  parser.add_argument('--principal_factors', type=int, help='m of HET-XL with a sigmoid')
  parser.add_argument('--dtype', default='bfloat16', help='of activations and products')
  parser.add_argument('--repeats', type=int, default=5, help='timed steps of each side')
  add_clock(parser)
  parser.add_argument('--png', type=Path, help='draw the grid here')
  args = parser.parse_args()
  total = len(args.batches) * (1 + len(args.heads) * len(args.samples))
  rows = collect(args.json, total, (row for x in args.batches for row in compare(args, x)))
  if args.png:
    args.png.write_bytes(grid_png(rows, GRID))
  fitting = [row for row in rows if row['time_ratio']]
  most = max(fitting, key=lambda row: (row['s'], row['b']))
  print(
    f'{jax.devices()[0].device_kind}: {most["head"]}, S = {most["s"]}, B = {most["b"]}: '
    f'{most["time_ratio"]:.3f} of the time and {most["memory_ratio"] or 1:.3f} of the temporary '
    'memory of DET'
  )


if __name__ == '__main__':
  main()
