"""Training with samples that follow the label and with plain ones, by the length of the run.

    python -m studies.samples.short_runs --json=rows.json [--heads=het,het_xl] [--steps=1000,4000]

A network of two hidden layers and a last layer of 8 dimensions learns noisy labels of 316
characters: 120,000 images of `glyphs_noisy_latin`, drawn with replacement. All runs of a seed have
the same batches. A row is a run: `nll` is that of 2,048 other images with 64 samples that follow
the label, `nll_stderr` its error over them, `train_nll` the mean loss of the last tenth.

Ten minutes on two CPU cores.
"""

import functools
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.command_line import collect, integers, make_parser, names
from het_plugin import Det, Het, HetH, HetXL, Integrator, LearnedTemperature, example_keys
from het_plugin.data.glyphs import SOURCES

TASK = 'glyphs_noisy_latin'
LEARNING_RATE = 3e-3
NUM_TEST = 2048
CHUNK = 100  # steps of one call
HEADS = {
  'det': Det,
  'het': functools.partial(Het, num_factors=50),
  'het_h': functools.partial(HetH, num_buckets=64, num_factors=50),
  'het_xl': functools.partial(HetXL, num_factors=50),
}
INTEGRATORS = {
  'S = 4': Integrator(4),
  'S = 16, tilt off': Integrator(16, tilt=False),
}


class Network(nn.Module):
  """Images [B, P] -> `GaussianLogits`."""

  head: nn.Module
  dim: int = 8

  @nn.compact
  def __call__(self, x):
    for _ in range(2):
      x = nn.relu(nn.Dense(256)(x))
    return self.head(nn.LayerNorm()(nn.Dense(self.dim)(x)))


def images(split, count):
  """Images [N, P] of mean 0 and deviation 1, and labels [N]."""
  pixels, labels = SOURCES[TASK].read(split, np.arange(count), 28, 0)
  flat = np.asarray(pixels, np.float32).reshape(count, -1)
  return (flat - flat.mean()) / flat.std(), np.asarray(labels[:, 0], np.int32)


def train(name, integrator, steps, seed, data, args):
  """The network, its parameters and the mean loss of the last tenth."""
  x, y = data
  network = Network(HEADS[name](num_classes=316, temperature=LearnedTemperature()))
  params = network.init(jax.random.key(seed), x[:1])
  schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
  state = optimizer.init(params)

  def loss(params, x, y, step):
    keys = example_keys(jax.random.key(seed), step * args.batch + jnp.arange(args.batch))
    return integrator.nll(network.apply(params, x), y, keys).mean()

  def step(carry, batch):
    params, state, number = carry
    value, gradient = jax.value_and_grad(loss)(params, *batch, number)
    updates, state = optimizer.update(gradient, state, params)
    return (optax.apply_updates(params, updates), state, number + 1), value

  run = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches))
  carry = params, state, jnp.int32(0)
  rng = np.random.default_rng(seed)
  losses = []
  for start in range(0, steps, CHUNK):
    rows = rng.integers(len(x), size=(min(CHUNK, steps - start), args.batch))
    carry, values = run(carry, (x[rows], y[rows]))
    losses.extend(np.asarray(values))
  return network, carry[0], float(np.mean(losses[-max(1, steps // 10) :]))


def evaluate(network, params, data):
  """-log p(y) of the examples, [N]."""
  integrator = Integrator(64)

  @jax.jit
  def nll(x, y, index):
    return integrator.nll(network.apply(params, x), y, example_keys(jax.random.key(0), index))

  index = np.arange(len(data[1]))
  parts = [nll(*(a[part] for a in (*data, index))) for part in np.split(index, 8)]
  return np.concatenate(parts)


def measure(args):
  data = images('train', args.examples)
  test = images('validation', args.test)
  for seed in range(args.seeds):
    for steps in args.steps:
      for name in args.heads:
        for samples, integrator in INTEGRATORS.items():
          if name == 'det' and integrator.tilt:
            continue  # it has no samples
          start = time.process_time()
          network, params, loss = train(name, integrator, steps, seed, data, args)
          seconds = time.process_time() - start
          nll = evaluate(network, params, test)
          yield dict(
            head=name,
            samples='' if name == 'det' else samples,
            steps=steps,
            seed=seed,
            train_nll=loss,
            nll=float(nll.mean()),
            nll_stderr=float(nll.std() / len(nll) ** 0.5),
            cpu_seconds=seconds,
          )


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--heads', type=names(HEADS), default=list(HEADS))
  parser.add_argument('--steps', type=integers, default=[1000, 4000], help='lengths of runs')
  parser.add_argument('--seeds', type=int, default=2, help='runs of each kind')
  parser.add_argument('--batch', type=int, default=128, help='examples of a step')
  parser.add_argument('--examples', type=int, default=120_000, help='images to train on')
  parser.add_argument('--test', type=int, default=NUM_TEST, help='images to evaluate on')
  args = parser.parse_args()
  per_length = sum(1 if name == 'det' else len(INTEGRATORS) for name in args.heads)
  rows = collect(args.json, args.seeds * len(args.steps) * per_length, measure(args))
  for name in args.heads:
    for steps in args.steps:
      found = {
        samples: [
          r['nll'] for r in rows if (r['head'], r['samples'], r['steps']) == (name, samples, steps)
        ]
        for samples in ('', *INTEGRATORS)
      }
      text = ', '.join(f'{k or "no samples"}: {np.mean(v):.3f}' for k, v in found.items() if v)
      print(f'{name}, {steps} steps: NLL with {text}')


if __name__ == '__main__':
  main()
