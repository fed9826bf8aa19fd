"""The error of log p(y) by sampler, for each head, random and trained, and sizes of the noise.

    python -m studies.samples.samplers [--json OUT]

RMSE of log p(y | x), from the loss, over keys, examples and labels y ~ p(y | x), against 16,384
rotated Sobol points with other keys; --samplers mean_field,taylor are the closed forms, and
'untilted' is 'sobol' as `log_prob` and `PredictiveLogits` take it, for all classes. The trained
heads learn images of which a third has a label of a similar class; the noise of both is then scaled
to a root mean square over classes of `noise_std`, over tau. A minute of CPU time; seconds with
--heads het_xl --noises 0.5 --steps 5 --classes 20 --reference_samples 4096 --trials 2.

    python -m studies.samples.samplers --principal_factors 1,2,4,8,16 --classes 2000 \\
      --dim 192 --batch 64

is about the sigmoid instead, which needs no samples: HET-XL, trained with the exact integral, with
its noise times 1 and 3. Per m: the mean relative error of the variances of the logits, bias and
root mean square of the error of the loss of an example, and of the gradient of the mean loss by the
head's parameters and by those of the noise, its cosine with the exact gradient and their ratio.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.command_line import (
  integers,
  make_parser,
  names,
  numbers,
  print_table,
  report,
  write_json,
)
from benchmarks.integrator import loss_rmse
from het_plugin.heads import Het, HetH, HetXL, LearnedTemperature
from het_plugin.integrate import SAMPLERS, Integrator, example_keys
from het_plugin.integrate.directions import reduced
from het_plugin.integrate.sigmoid import marginals
from studies.samples.analytic import ESTIMATORS, Analytic

HEADS = {'het': Het, 'het_h': HetH, 'het_xl': HetXL}
TRAIN_BATCH = 128
SAMPLING = {name: {'sampler': name} for name in SAMPLERS} | {'untilted': {'tilt': False}}


def parse_args():
  parser = make_parser(__doc__)
  parser.add_argument('--batch', type=int, default=8, help='examples B')
  parser.add_argument('--classes', type=int, default=200, help='classes K')
  parser.add_argument('--dim', type=int, default=32, help='pre-logits D')
  parser.add_argument('--factors', type=int, default=50, help='factors R')
  parser.add_argument('--reference_samples', type=int, default=2**14, help='S of the reference')
  parser.add_argument('--heads', type=names(HEADS), default=list(HEADS), help=','.join(HEADS))
  samplers = *SAMPLING, *ESTIMATORS
  parser.add_argument('--samplers', type=names(samplers), default=['iid', 'sobol'])
  parser.add_argument('--samples', type=integers, default=[64, 1000], help='values of S')
  parser.add_argument(
    '--noises',
    type=numbers,
    default=[0.1, 0.5, 1.0, 2.0],
    help='standard deviations of the logits over tau',
  )
  parser.add_argument('--steps', type=int, default=200, help='training steps of the trained heads')
  parser.add_argument('--principal_factors', type=integers, help='values of m, for a sigmoid')
  parser.add_argument('--trials', type=int, default=64, help='keys and labels per example')
  args = parser.parse_args()
  # The closed forms take no samples.
  args.columns = [
    (name, s) for name in args.samplers for s in (args.samples if name in SAMPLING else [0])
  ]
  return args


class Problem:
  """Pre-logits phi around the mean of their class; similar classes are taken for each other."""

  def __init__(self, args):
    rng = np.random.default_rng(0)
    groups = rng.normal(size=(max(1, args.classes // 5), args.dim))
    self.group = np.arange(args.classes) % len(groups)
    self.means = groups[self.group] + 0.5 * rng.normal(size=(args.classes, args.dim))

  def batch(self, rng, size):
    """phi [B, D] and labels [B]."""
    y = rng.integers(len(self.means), size=size)
    phi = self.means[y] + 0.5 * rng.normal(size=(size, self.means.shape[1]))
    similar = np.array([rng.choice(np.flatnonzero(self.group == self.group[i])) for i in y])
    y = np.where(rng.random(size) < 1 / 3, similar, y)
    return jnp.asarray(phi, jnp.float32), jnp.asarray(y, jnp.int32)


def train(head, problem, num_steps):
  """Parameters after some steps of Adam."""
  integrator = Integrator(64, sampler='sobol')
  optimizer = optax.adam(1e-2)
  rng = np.random.default_rng(1)
  params = jax.jit(head.init)(jax.random.key(0), problem.batch(rng, 1)[0])['params']

  @jax.jit
  def step(params, state, phi, labels, index):
    def loss(params):
      keys = example_keys(jax.random.fold_in(jax.random.key(1), index), jnp.arange(len(phi)))
      return integrator.nll(head.apply({'params': params}, phi), labels, keys).mean()

    updates, state = optimizer.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state

  state = optimizer.init(params)
  for index in range(num_steps):
    params, state = step(params, state, *problem.batch(rng, TRAIN_BATCH), index)
  return params


def measure(args):
  """Rows {head, weights, noise_std, sampler, s, rmse}."""
  problem = Problem(args)
  rows = []
  phi, _ = problem.batch(np.random.default_rng(2), args.batch)
  log_prob = jax.jit(
    lambda integrator, logits, keys: integrator.log_prob(logits, keys), static_argnums=0
  )
  for name in args.heads:
    head = HEADS[name](
      args.classes, class_multiple=1, num_factors=args.factors, temperature=LearnedTemperature()
    )
    for weights, steps in (('random', 0), ('trained', args.steps)):
      logits = jax.jit(head.apply)({'params': train(head, problem, steps)}, phi)
      std = jax.jit(lambda x: jnp.sqrt(marginals(x)[1].mean()))(logits)
      for noise in args.noises:
        scaled = logits.replace(covariance=logits.covariance.scaled(noise / std))
        reference = Integrator(args.reference_samples, sampler='sobol')
        keys = example_keys(jax.random.key(2**31 - 1), jnp.arange(args.batch))
        expected = log_prob(reference, scaled, keys)
        for sampler, s in args.columns:
          integrator = Integrator(s, **SAMPLING[sampler]) if s else Analytic(sampler)
          error = loss_rmse(integrator, scaled, expected, args.trials)
          row = dict(head=name, weights=weights, noise_std=noise, sampler=sampler, s=s)
          rows.append(row | {'rmse': error})
  return rows


def measure_principal(args):
  """Rows {noise, m, variance_error, bias, rms, cosine, norm, noise_cosine, noise_norm}."""
  problem = Problem(args)
  rows = []
  head = HetXL(
    args.classes,
    class_multiple=1,
    num_factors=args.factors,
    temperature=LearnedTemperature(),
    link='sigmoid',
    initial_bias=-10.0,
  )
  params = train(head, problem, args.steps)
  phi, labels = problem.batch(np.random.default_rng(2), args.batch)

  def logits_of(params, scale):
    logits = head.apply({'params': params}, phi)
    return logits.replace(covariance=logits.covariance.scaled(scale))

  def mean_and_losses(params, scale, integrator):
    nll = integrator.nll(logits_of(params, scale), labels)
    return nll.mean(), nll

  @functools.partial(jax.jit, static_argnums=2)
  def errors(params, scale, m, found, expected):
    (found, nll_of_m), (expected, nll) = found, expected
    logits = logits_of(params, scale)
    approximate = logits.replace(covariance=reduced(logits.covariance, m))
    of_m, variance = (marginals(x)[1] for x in (approximate, logits))
    error = nll_of_m - nll
    row = {'variance_error': jnp.abs(of_m / variance - 1.0).mean(), 'loss': nll.mean()}
    row |= {'bias': error.mean(), 'rms': jnp.sqrt(jnp.square(error).mean())}
    row['cosine'], row['norm'] = compare(found, expected)
    of_noise = found['covariance'], expected['covariance']
    row['noise_cosine'], row['noise_norm'] = compare(*of_noise)
    return row

  gradient = jax.jit(jax.grad(mean_and_losses, has_aux=True), static_argnums=2)
  for scale in (1.0, 3.0):
    expected = gradient(params, scale, Integrator())
    for m in args.principal_factors:
      found = gradient(params, scale, Integrator(principal_factors=m))
      row = errors(params, scale, m, found, expected)
      rows.append({'noise': scale, 'm': m} | {name: float(x) for name, x in row.items()})
  return rows


def compare(found, expected):
  """The cosine of two trees of arrays, and the ratio of their norms."""
  x, y = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (found, expected))
  sizes = jnp.linalg.norm(x), jnp.linalg.norm(y)
  return x @ y / (sizes[0] * sizes[1]), sizes[0] / sizes[1]


def title(sampler, s):
  return f'{sampler} S={s}' if s else sampler


def main():
  args = parse_args()
  if args.principal_factors:
    rows = measure_principal(args)
    report(args.json, rows)
    print(f'the loss of an example errs by {rows[0]["rms"]:.2g} nats with m = {rows[0]["m"]}')
    return
  rows = measure(args)
  table = {}
  for row in rows:
    key = row['weights'], row['head'], row['noise_std']
    table.setdefault(key, {})[row['sampler'], row['s']] = row['rmse']
  print(
    f'RMSE of log p(y); B = {args.batch}, D = {args.dim}, K = {args.classes}, '
    f'R = {args.factors}, {args.trials} keys'
  )
  header = 'weights', 'head', 'std', *(title(*column) for column in args.columns)
  print_table(header, [(*key, *(of[c] for c in args.columns)) for key, of in table.items()])
  first = next(c for c in args.columns if c[0] == args.samplers[-1])
  last = next(c for c in reversed(args.columns) if c[0] == args.samplers[0])
  better = sum(of[first] < of[last] for of in table.values())
  print(f'{title(*first)} is below {title(*last)} in {better} of {len(table)}')
  write_json(args.json, {'rows': rows, 'better': better, 'of': len(table)})


if __name__ == '__main__':
  main()
