"""log E[sigmoid(u)] of a normal u from its mean and variance alone: no samples, no keys, no bias.

The link 'sigmoid' needs the marginal N(mu_k, v_k) of each logit only, so the expectation is a
one-dimensional integral per class. A scale mixture of normal distribution functions
(Monahan and Stefanski 1992), sigmoid(x) ~ sum_i p_i Phi(s_i x), is integrated in closed form:

    E[sigmoid(u)] ~ sum_i p_i Phi(a_i mu),    a_i = s_i / sqrt(1 + s_i^2 v)

Their eight terms are minimax in absolute error, which is too coarse for log p at mu = -20. The
eleven terms here minimise max |error(x)| exp(|x| / 2), which is 8e-9. That suffices for
mu >= -v / 2. An exact identity maps every other mean there: sigmoid(u) = exp(u) sigmoid(-u), and
exp(u) turns N(mu, v) into N(mu + v, v), so

    log E[sigmoid(u)] = mu + v / 2 + log E[sigmoid(u')],    u' ~ N(-(mu + v), v)

Derivatives come from the same sums, which have terms of one sign each: with Q = E[sigmoid(u)],
dQ/dmu = E[sigmoid'] = sum_i p_i a_i phi(a_i mu), and dQ/dv = E[sigmoid''] / 2 by the heat equation.
In float32, for |mu| <= 100 and standard deviations up to 50, log p differs from quadrature in
float64 by at most 1e-6 and half a unit in its last place, and its derivatives by at most 1e-5,
relative (tests).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.integrate import placement
from het_plugin.integrate.gaussian import GaussianLogits, Linear, LowRank, apply_projection

# p_i and s_i, ascending in s_i. Fitted by reweighted least squares on x in [0, 44], and to the
# second derivative on x in [0, 2.5].
WEIGHTS = np.array([
  1.2904026551917083e-06, 1.2336920492746331e-04, 2.3948151169983405e-03, 1.8084088984290474e-02,
  7.0485673577492705e-02, 1.6664420917962169e-01, 2.6079627101100372e-01, 2.6961520345181461e-01,
  1.6393175441667290e-01, 4.4902012708761069e-02, 3.0213270767139827e-03,
])  # fmt: skip
SCALES = np.array([
  0.17609721120178354, 0.2124473639971835, 0.25404182892994104, 0.30451059690721971,
  0.367587175272233, 0.44789597723679253, 0.55101513505194, 0.6832907036657575,
  0.85266017217682966, 1.0716945469525962, 1.3699297667275878,
])  # fmt: skip

# The polynomial of `_erfcx`, highest power first; a least-squares fit at Chebyshev nodes.
ERFCX = (
  -6.1907530945e-05, -6.39178660536e-05, 0.000575734629271, 0.000463337520621,
  -0.00435049234042, 0.000946759630307, 0.0327520525686, -0.102970538356,
  0.157630994362, -0.0990242416581, -0.122356800752, 1.26483818024,
)  # fmt: skip

# The share of a budget for logits that projected factors may take. With their gradients and the
# operands of the products, three times as much exists at one time.
BUDGET_SHARE = 8

# The identity is used if the mean plus half the variance is below this. With 0, the derivative by v
# would be a difference of nearly equal numbers near mu = 0.
REFLECT_BELOW = -2.0


@jax.custom_jvp
def log_expected_sigmoid(mean: jax.Array, variance: jax.Array) -> jax.Array:
  """log E[sigmoid(u)], u ~ N(mean, variance), elementwise; float32 or float64, variance >= 0.

  Any derivative exists; the first two are accurate (module docstring).
  """
  return _moments(mean, variance)[0]


@log_expected_sigmoid.defjvp
def _jvp(primals, tangents):
  value, by_mean, by_variance = _moments(*primals)
  return value, by_mean * tangents[0] + by_variance * tangents[1]


@jax.custom_jvp
def expected_log_odds(mean: jax.Array, variance: jax.Array) -> jax.Array:
  """log p - log(1 - p) of p = E[sigmoid(u)], u ~ N(mean, variance); as `log_expected_sigmoid`."""
  return _log_odds(mean, variance)[0]


@expected_log_odds.defjvp
def _log_odds_jvp(primals, tangents):
  value, by_mean, by_variance = _log_odds(*primals)
  return value, by_mean * tangents[0] + by_variance * tangents[1]


def expected_entropy(mean: jax.Array, variance: jax.Array) -> jax.Array:
  """E[H(sigmoid(u))] in nats, the entropy of the binary label given u, for u ~ N(mean, variance).

  H(sigmoid(u)) is the integral of -t sigmoid'(t) from u to infinity, so the mixture integrates it:
  sum_i p_i phi(a_i mu) / (a_i (1 + s_i^2 v)).
  """

  def add(total, term):
    p, s = term
    spread = 1.0 + s**2 * variance
    density = jnp.exp(-0.5 * jnp.square(s * mean) / spread) / math.sqrt(2 * math.pi)
    return total + (p / s) * density * jax.lax.rsqrt(spread), None

  terms = jnp.asarray(WEIGHTS, mean.dtype), jnp.asarray(SCALES, mean.dtype)
  return jax.lax.scan(add, jnp.zeros_like(mean), terms)[0]


def _moments(mean, variance):
  """log E[sigmoid(u)] and its derivatives by mean and variance."""
  return _complement(*_smaller_moments(mean, variance), mean > 0)


def _smaller_moments(mean, variance):
  """`_moments` at -|mean|, of the smaller one of p and 1 - p; the other one follows from it."""
  below = -jnp.abs(mean)
  tilt = below + 0.5 * variance
  reflected = tilt < REFLECT_BELOW
  inner = jnp.where(reflected, -(below + variance), below)
  log_q, first, second = _log_mixture(-jnp.abs(inner), variance)
  # If the reflected mean is positive, log(1 - q) and its derivatives replace those of log q.
  positive = inner > 0
  log_inner, by_inner, by_variance = _complement(log_q, first, second, positive)
  value = jnp.where(reflected, tilt + log_inner, log_inner)
  by_mean = jnp.where(reflected, 1.0 - by_inner, by_inner)
  by_variance = jnp.where(reflected, 0.5 - by_inner + by_variance, by_variance)
  return value, by_mean, by_variance


def _log_odds(mean, variance):
  """The log odds of E[sigmoid(u)], odd in the mean, and their derivatives."""
  log_q, by_mean, by_variance = _smaller_moments(mean, variance)
  q = jnp.exp(log_q)
  sign = jnp.where(mean > 0, -1.0, 1.0).astype(mean.dtype)
  log_odds = sign * (log_q - jnp.log1p(-q))
  return log_odds, by_mean / (1.0 - q), sign * by_variance / (1.0 - q)


def _complement(log_q, by_mean, by_variance, where):
  """log(1 - q) and its derivatives at the mirrored mean, from those of log q <= log 1/2."""
  q = jnp.exp(log_q)
  odds = q / (1.0 - q)
  return (
    jnp.where(where, jnp.log1p(-q), log_q),
    jnp.where(where, odds, 1.0) * by_mean,
    jnp.where(where, -odds, 1.0) * by_variance,
  )


def _log_mixture(mean, variance):
  """log Q of the mixture, dQ/dmean / Q and dQ/dvariance / Q, for mean <= 0.

  All sums are relative to exp(-(a_0 mu)^2 / 2) with the smallest a_0, so that none underflows.
  """
  lowest = float(SCALES[0])  # a scalar of NumPy would widen float32 to float64
  z2_0 = jnp.square(lowest * mean) / (1.0 + lowest**2 * variance)

  def sums(mean, variance, z2_0, unroll=1):
    def add(sums, term):
      p, s = term
      spread = 1.0 + s**2 * variance
      a = s * jax.lax.rsqrt(spread)
      bump = p * jnp.exp(0.5 * (z2_0 - jnp.square(s * mean) / spread))  # p exp(-z^2 / 2)
      new = bump * _erfcx(-a * mean * math.sqrt(0.5)), bump * a, bump * a * a * a
      return jax.tree.map(jnp.add, sums, new), None

    terms = jnp.asarray(WEIGHTS, mean.dtype), jnp.asarray(SCALES, mean.dtype)
    return jax.lax.scan(add, (jnp.zeros_like(mean),) * 3, terms, unroll=unroll)[0]

  # A CPU would keep all terms of unrolled sums at one time. A TPU's registers hold them: libtpu
  # expects a third of the loop's cycles.
  q, first, second = jax.lax.platform_dependent(
    mean, variance, z2_0, cpu=sums, default=functools.partial(sums, unroll=True)
  )
  log_q = jnp.log(0.5 * q) - 0.5 * z2_0
  density = math.sqrt(2.0 / math.pi) / q
  return log_q, density * first, density * second * (-0.5 * mean)


def _erfcx(x):
  """exp(x^2) erfc(x) for x >= 0, to 6e-9 relative: (1 + 2 x) erfcx(x) is smooth in
  t = (x - 2.5) / (x + 2.5) up to infinity (Shepherd and Laframboise 1981).
  """
  t = (x - 2.5) / (x + 2.5)
  g = 0.0
  for coefficient in ERFCX:
    g = g * t + coefficient
  return g / (1.0 + 2.0 * x)


def marginals(logits: GaussianLogits, chunk_bytes: int) -> tuple[jax.Array, jax.Array]:
  """Mean and variance [B, Kp] of the logits over tau; any covariance, no opaque projection.

  The variance of class k is the sum over factors of their squares in logit space. It costs B Kp
  without a projection, B H and an indexing with a hash, and (R + 1) Q Kp multiply-adds per example
  with a linear projection. In that case the projected factors [B, R, Kp] are kept for the backward
  pass if they fit into an eighth of `chunk_bytes` per device. Otherwise groups of factors of that
  size are projected one after the other, in both directions, and only the last one is kept. A group
  needs no communication with other devices.
  """
  inverse = 1.0 / logits.temperature
  mean = logits.location * inverse
  if logits.covariance is None:
    return mean, jnp.zeros_like(mean)
  noise = logits.covariance.scaled(inverse)
  projection = logits.projection
  if isinstance(projection, Linear):
    return _projected_marginals(chunk_bytes, noise, projection, mean, inverse)
  return mean, apply_projection(projection, variances(noise)[:, None])[:, 0]


def variances(noise: LowRank) -> jax.Array:
  """Var(eps_q), [B, Q]."""
  variance = jnp.square(noise.loading).sum(-2)  # [Q] where all examples share J, or [B, Q]
  if noise.scale is not None:
    variance = variance * jnp.square(noise.scale)
  return variance + jnp.square(noise.diag)


def _projected_marginals(chunk_bytes, noise, projection, mean, inverse):
  limit = max(1, chunk_bytes // BUDGET_SHARE // placement.bytes_per_device(mean))
  num_factors = max(1, noise.num_factors)  # without factors there is one group, and it is empty
  num_groups = -(-num_factors // limit)
  size = -(-num_factors // num_groups)
  num_streamed = (-(-num_factors // size) - 1) * size
  # phi, d and the last group share one product with W.
  rows = [noise.replace(loading=noise.loading[..., num_streamed:, :]).dense_loading()]
  if noise.remainder == 'rank_one':
    rows.append(noise.diag[:, None])
  phi = jnp.zeros_like(noise.diag) if projection.phi is None else projection.phi * inverse
  rows = jnp.concatenate([*rows, phi[:, None]], axis=1)
  of_phi, variance = last_and_squares(_product(rows, projection.kernel))
  if projection.phi is not None:
    mean = of_phi + projection.bias * inverse
  if noise.remainder == 'diag':
    variance += apply_projection(
      Linear(jnp.square(projection.kernel)), jnp.square(noise.diag)[:, None]
    )[:, 0]
  if num_streamed:
    loading = noise.loading[..., :num_streamed, :]
    variance += _streamed_variance(noise.scale, loading, projection.kernel, size)
  return mean, variance


def _product(x, kernel):
  """x [B, T, Q] times W [Q, Kp]; on a CPU as a product of matrices, which avoids copies."""

  def as_matrices(x, kernel):
    flat = apply_projection(Linear(kernel), x.reshape(-1, x.shape[-1]))
    return flat.reshape(*x.shape[:2], kernel.shape[-1])

  def in_general(x, kernel):
    return apply_projection(Linear(kernel), x)

  return jax.lax.platform_dependent(x, kernel, cpu=as_matrices, default=in_general)


@jax.custom_jvp
def last_and_squares(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The last row, and the sum of the others' squares, [B, Kp] of [B, T, Kp]."""
  return rows[:, -1], jnp.square(rows[:, :-1]).sum(1)


@last_and_squares.defjvp
def _last_and_squares_jvp(primals, tangents):
  # Sums under a mask, whose transpose is one array [B, T, Kp]; that of slices is three.
  (rows,), (tangent,) = primals, tangents
  is_noise = (jnp.arange(rows.shape[1]) < rows.shape[1] - 1)[:, None]
  of_squares = jnp.where(is_noise, 2.0 * rows * tangent, 0.0).sum(1)
  return last_and_squares(rows), (jnp.where(is_noise, 0.0, tangent).sum(1), of_squares)


def _streamed_variance(scale, loading, kernel, size):
  """sum_r (sum_q v_q J_rq W_qk)^2, [B, Kp], of `size` factors at a time; if v is None, J is
  [B, R, Q].
  """

  @jax.checkpoint
  def of_group(group, scale, kernel):
    rows = group if scale is None else group * scale[:, None]
    return jnp.square(apply_projection(Linear(kernel), rows)).sum(1)

  def local(scale, loading, kernel):
    *batch, count, noise_dim = loading.shape
    groups = jnp.moveaxis(loading.reshape(*batch, count // size, size, noise_dim), -3, 0)

    def add(total, group):
      return total + of_group(group, scale, kernel), None

    batch = (loading if scale is None else scale).shape[0]
    dtype = jnp.promote_types(loading.dtype, jnp.float32)
    zero = jnp.zeros_like(loading, dtype, shape=(batch, kernel.shape[-1]))
    return jax.lax.scan(add, zero, groups)[0]

  inputs = 'bq', 'brq' if scale is None else 'rq', 'qk'
  batch = (loading if scale is None else scale).shape[0]
  where = placement.Placement.current(batch)
  return where.shard_map(local, inputs, 'bk')(scale, loading, kernel)
