"""What the benchmarks of estimators share: random Gaussian logits and the reference answer."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.integrate import GaussianLogits, Integrator, Linear, LowRank, example_keys

# Standard deviation of the logits over tau, root mean square over classes.
NOISE = {'small': 0.5, 'moderate': 1.2, 'large': 3.0}


def add_flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('--batch', type=int, default=8, help='examples B')
  parser.add_argument('--classes', type=int, default=500, help='classes K')
  parser.add_argument('--dim', type=int, default=64, help='pre-logits D')
  parser.add_argument('--factors', type=int, default=50, help='factors R')
  parser.add_argument(
    '--reference_samples', type=int, default=100_000, help='samples S of the reference answer'
  )


def make_logits(args: argparse.Namespace, noise: float, link: str = 'softmax') -> GaussianLogits:
  """HET-XL's logits with random parameters: pre-logits, W, J, v(x) normal, d(x) a softplus.

  The mean logits have standard deviation 3 (sigmoid: around -4), so that predictions are neither
  flat nor certain; the noise is scaled to a standard deviation of `noise`.
  """
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  kernel = normal(args.dim, args.classes) / np.sqrt(args.dim)
  covariance = LowRank(
    scale=normal(args.batch, args.dim),
    loading=normal(args.factors, args.dim),
    diag=jax.nn.softplus(normal(args.batch, args.dim)),
  )
  logits = GaussianLogits(
    location=3.0 * normal(args.batch, args.dim) @ kernel - (4.0 if link == 'sigmoid' else 0.0),
    covariance=covariance,
    projection=Linear(kernel),
    temperature=jnp.float32(1.0),
    num_classes=args.classes,
    link=link,
  )
  std = jnp.sqrt(jnp.square(logits.factors()).sum(1).mean())
  return logits.replace(covariance=covariance.scaled(noise / std))


def keys_of(args: argparse.Namespace, seed: int) -> jax.Array:
  return example_keys(jax.random.key(seed), jnp.arange(args.batch))


def reference_log_prob(args: argparse.Namespace, logits: GaussianLogits) -> jax.Array:
  """log p of every class [B, K]: exact (sigmoid), or by samples that no estimate here shares."""
  integrator = Integrator(num_samples=args.reference_samples)
  return jax.jit(integrator.log_prob)(logits, keys_of(args, seed=2**31 - 1))


def rmse(error: jax.Array, log_p: jax.Array, link: str = 'softmax') -> float:
  """Root mean square of the error [..., B, K] of the log-probability of a label drawn from the
  predictive distribution log_p [B, K] itself, summed out. Sigmoid: of log p(y_k = 1), weighted by
  p(y_k = 1).
  """
  return float(jnp.sqrt(expectation(jnp.square(error), log_p, link)))


def loss_rmse(
  integrator: Integrator, logits: GaussianLogits, log_p: jax.Array, num_keys: int
) -> float:
  """RMSE of -`Integrator.nll` under a softmax, over keys, examples and labels drawn from the
  predictive distribution log_p [B, K]; each key comes with new labels.
  """
  nll = jax.jit(integrator.nll)
  errors = []
  for i in range(num_keys):
    labels = jax.random.categorical(jax.random.fold_in(jax.random.key(2**31 - 2), i), log_p)
    keys = example_keys(jax.random.key(i), jnp.arange(len(labels)))
    at_label = jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
    errors.append(nll(logits, labels, keys) + at_label)
  return float(jnp.sqrt(jnp.square(jnp.stack(errors)).mean()))


def expectation(value: jax.Array, log_p: jax.Array, link: str = 'softmax') -> jax.Array:
  """Mean over examples (and leading axes) of `value` [..., B, K] under the labels' distribution."""
  p = jnp.exp(log_p)
  if link == 'sigmoid':
    p = p / p.sum(-1, keepdims=True)
  return (p * value).sum(-1).mean()


def problem_line(args: argparse.Namespace) -> str:
  return (
    f'HET-XL, B = {args.batch}, K = {args.classes}, D = {args.dim}, R = {args.factors}, '
    f'reference of {args.reference_samples} independent samples'
  )
