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
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.integrate.classes import Classes, EveryClass, MaybeArray, Tile, Tiling, classes_of
from het_plugin.integrate.directions import reduced
from het_plugin.integrate.gaussian import PADDED, GaussianLogits, Hashed, Linear, matmul, over_tau
from het_plugin.integrate.sampled_logits import Samples

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

# Values per class and example beside those of factors.
NUM_VALUES = 8

# The identity is used if the mean plus half the variance is below this. With 0, the derivative by v
# would be a difference of nearly equal numbers near mu = 0.
REFLECT_BELOW = -2.0

Triple = tuple[jax.Array, jax.Array, jax.Array]  # a value, and its derivatives by mean and variance


@jax.custom_jvp
def log_expected_sigmoid(mean: jax.Array, variance: jax.Array) -> jax.Array:
  """log E[sigmoid(u)], u ~ N(mean, variance), elementwise; float32 or float64, variance >= 0.

  Any derivative exists; the first two are accurate (module docstring).
  """
  return _moments(mean, variance)[0]


@jax.custom_jvp
def expected_log_odds(mean: jax.Array, variance: jax.Array) -> jax.Array:
  """log p - log(1 - p) of p = E[sigmoid(u)], u ~ N(mean, variance); as `log_expected_sigmoid`."""
  return _log_odds(mean, variance)[0]


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


def _moments(mean: jax.Array, variance: jax.Array) -> Triple:
  """log E[sigmoid(u)] and its derivatives by mean and variance."""
  return _complement(*_smaller_moments(mean, variance), mean > 0)


def _smaller_moments(mean: jax.Array, variance: jax.Array) -> Triple:
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


def _log_odds(mean: jax.Array, variance: jax.Array) -> Triple:
  """The log odds of E[sigmoid(u)], odd in the mean, and their derivatives."""
  log_q, by_mean, by_variance = _smaller_moments(mean, variance)
  q = jnp.exp(log_q)
  sign = jnp.where(mean > 0, -1.0, 1.0).astype(mean.dtype)
  log_odds = sign * (log_q - jnp.log1p(-q))
  return log_odds, by_mean / (1.0 - q), sign * by_variance / (1.0 - q)


def _jvp(function: Callable[..., Triple], primals: tuple, tangents: tuple) -> tuple:
  value, by_mean, by_variance = function(*primals)
  return value, by_mean * tangents[0] + by_variance * tangents[1]


log_expected_sigmoid.defjvp(functools.partial(_jvp, _moments))
expected_log_odds.defjvp(functools.partial(_jvp, _log_odds))


def _complement(
  log_q: jax.Array, by_mean: jax.Array, by_variance: jax.Array, where: jax.Array
) -> Triple:
  """log(1 - q) and its derivatives at the mirrored mean, from those of log q <= log 1/2."""
  q = jnp.exp(log_q)
  odds = q / (1.0 - q)
  return (
    jnp.where(where, jnp.log1p(-q), log_q),
    jnp.where(where, odds, 1.0) * by_mean,
    jnp.where(where, -odds, 1.0) * by_variance,
  )


def _log_mixture(mean: jax.Array, variance: jax.Array) -> Triple:
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


def _erfcx(x: jax.Array) -> jax.Array:
  """exp(x^2) erfc(x) for x >= 0, to 6e-9 relative: (1 + 2 x) erfcx(x) is smooth in
  t = (x - 2.5) / (x + 2.5) up to infinity (Shepherd and Laframboise 1981).
  """
  t = (x - 2.5) / (x + 2.5)
  g = 0.0
  for coefficient in ERFCX:
    g = g * t + coefficient
  return g / (1.0 + 2.0 * x)


@jax.custom_jvp
def last_and_squares(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The last row, and the sum of the others' squares, [B, K] of [B, T, K]."""
  return rows[:, -1], jnp.square(rows[:, :-1]).sum(1)


@last_and_squares.defjvp
def _last_and_squares_jvp(primals: tuple, tangents: tuple) -> tuple:
  # Sums under a mask, whose transpose is one array [B, T, K]; that of slices is three.
  (rows,), (tangent,) = primals, tangents
  is_noise = (jnp.arange(rows.shape[1]) < rows.shape[1] - 1)[:, None]
  of_squares = jnp.where(is_noise, 2.0 * rows * tangent, 0.0).sum(1)
  return last_and_squares(rows), (jnp.where(is_noise, 0.0, tangent).sum(1), of_squares)


# The link


class ExactSigmoid(Samples):
  """log p of a sigmoid by the marginals of the logits; without noise, their variance is 0.

  Its one chunk has the location's classes, with factors of HET-XL, the noise of HET or the buckets
  of HET-H. The arrays are variances [B, Q] of independent noise of HET-XL's dimensions or of
  HET-H's buckets, or None.
  """

  @classmethod
  def of(
    cls,
    logits: GaussianLogits,
    max_bytes: int | None = None,
    principal_factors: int | None = None,
  ) -> 'ExactSigmoid':
    """The link of logits over tau with a known projection; arguments as in `Integrator`.

    The variance of class k is the sum over factors of their squares in logit space. It costs B Kp
    without a projection, B H and an indexing with a hash, and (R + 1) Q Kp multiply-adds per
    example with a linear projection.
    """
    noise = logits.covariance
    spread = buckets = None
    if noise is None:
      num_values = 2
      classes = classes_of(logits)
    elif isinstance(logits.projection, Linear):
      noise = noise if principal_factors is None else reduced(noise, principal_factors)
      num_values = NUM_VALUES + noise.num_factors
      classes = classes_of(logits, noise.factors(), 'factors')
      spread = jnp.square(noise.diag) if noise.remainder == 'diag' else None
    elif isinstance(logits.projection, Hashed):
      num_values = NUM_VALUES
      classes = classes_of(logits)
      spread = noise.variances()
      buckets = logits.projection.buckets
    else:
      num_values = NUM_VALUES + (noise.num_factors if noise.scale is None else 0)
      classes = Classes(location=logits.location[:, None], noise=noise)
    tiling = Tiling.of(logits, num_values, max_bytes)
    return cls.of_one(EveryClass(tiling, classes, arrays=spread, buckets=buckets))

  def nll(self, labels: jax.Array) -> jax.Array:
    """The sum over classes of -log p(y_k), [B], with y_k = 1 for the labels int32 [B, L]."""
    return -self.chunk(0, labels).total(self.log_p_of)

  def log_odds(self) -> jax.Array:
    """log p(y_k = 1) - log p(y_k = 0) [B, Kp]."""
    return self.chunk(0).values(_log_odds_of_class)

  def log_p_of(self, tile: Tile) -> jax.Array:
    """As in `Samples`, of y_k = 1, or of the signs of labels."""
    mean, variance = _marginals(tile)
    labels = tile.constants.labels
    if labels is not None:
      mean = mean * sign_of(tile, labels)
    return jax.nn.log_sigmoid(mean) if variance is None else log_expected_sigmoid(mean, variance)

  def entropies(self, tile: Tile) -> jax.Array:
    """As in `Samples`."""
    mean, variance = _marginals(tile)
    return binary_entropy(mean) if variance is None else expected_entropy(mean, variance)


def _marginals(tile: Tile) -> tuple[jax.Array, MaybeArray]:
  """Mean and variance [B, t] of the logits of a tile; no variance without noise."""
  classes = tile.classes
  spread = tile.arrays
  if classes.noise is not None:
    return classes.mean()[:, 0], classes.noise.variances()
  if classes.kind != 'factors':
    mean = classes.logits()[:, 0]
    return mean, None if spread is None else spread[:, tile.buckets]
  rows, mu = classes.rows()
  if mu is None:
    mean, variance = last_and_squares(rows)
  else:
    mean = mu[:, 0]
    variance = jnp.square(rows).sum(axis=1)
  if spread is not None and classes.kernel is not None:
    variance += matmul(spread, jnp.square(classes.kernel))
  return mean if classes.bias is None else mean + classes.bias, variance


def sign_of(tile: Tile, labels: jax.Array) -> jax.Array:
  """1 at classes that are labels int32 [B, L], and -1 elsewhere, [B, t]."""
  return jnp.where(tile.is_label(labels).any(axis=1), 1.0, -1.0)


def _log_odds_of_class(tile: Tile) -> jax.Array:
  mean, variance = _marginals(tile)
  return mean if variance is None else expected_log_odds(mean, variance)


def binary_entropy(u: jax.Array) -> jax.Array:
  """The entropy of a binary label with the log odds u, elementwise, nats."""
  log_p = jax.nn.log_sigmoid(u)
  log_q = jax.nn.log_sigmoid(-u)
  return -(jnp.exp(log_p) * log_p + jnp.exp(log_q) * log_q)


def marginals(logits: GaussianLogits) -> tuple[jax.Array, jax.Array]:
  """Mean and variance [B, Kp] of the logits over tau, all classes at one time.

  No opaque projection has them.
  """
  every_class = ExactSigmoid.of(over_tau(logits), max_bytes=2**62).chunk(0)
  mean = every_class.values(lambda tile: _marginals(tile)[0])
  if logits.covariance is None:
    return mean, jnp.zeros_like(mean)
  return mean, every_class.values(lambda tile: _marginals(tile)[1])


# From samples


class SampledSigmoid(Samples):
  """log p of a sigmoid from samples; methods as those of `ExactSigmoid`.

  It keeps an array [B, Kp], since the mean over samples is taken for each class.
  """

  def nll(self, labels: jax.Array) -> jax.Array:
    """The loss [B] (`ExactSigmoid.nll`)."""
    log_p = self.log_prob(labels)
    is_class = jnp.arange(log_p.shape[-1]) < self.tiling.num_classes
    return -jnp.where(is_class, log_p, 0.0).sum(axis=-1)

  def log_odds(self) -> jax.Array:
    """log p(y_k = 1) - log p(y_k = 0) [B, Kp]."""
    log_p = self.log_prob()
    no_label = jnp.full_like(log_p[:, :1], -1, jnp.int32)
    return log_p - self.log_prob(no_label)

  def log_p_of(self, tile: Tile) -> jax.Array:
    """As in `Samples`, of y_k = 1, or of the signs of labels."""
    labels = tile.constants.labels
    log_weight = tile.constants.log_weight
    u = tile.classes.logits(tile.constants.z)
    x = u if labels is None else u * sign_of(tile, labels)[:, None].astype(u.dtype)
    if log_weight is not None:  # 0, or far below it where a sample does not count
      x = jnp.where(log_weight[..., None] < 0, 2 * PADDED, x)  # which makes all that follows 0
    return _log_sum_sigmoid(x) - math.log(self.num_samples)

  def entropies(self, tile: Tile) -> jax.Array:
    """As in `Samples`."""
    log_weight = tile.constants.log_weight
    entropies = binary_entropy(tile.classes.logits(tile.constants.z))
    if log_weight is not None:
      entropies = jnp.where(log_weight[..., None] < 0, 0.0, entropies)
    return entropies.sum(axis=1)


@jax.custom_jvp
def _log_sum_sigmoid(x: jax.Array) -> jax.Array:
  """log sum_s sigmoid(x_s), [B, t] of [B, s, t]."""
  top, sigmoid, _ = _sigmoids(x)
  return top + jnp.log(sigmoid.sum(axis=1))


@_log_sum_sigmoid.defjvp
def _log_sum_sigmoid_jvp(primals: tuple, tangents: tuple) -> tuple:
  (x,) = primals
  top, sigmoid, slope = _sigmoids(x)
  total = sigmoid.sum(axis=1)
  gradient = slope / total[:, None]
  return top + jnp.log(total), (gradient * tangents[0]).sum(axis=1)


def _sigmoids(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """top = min(max_s x, 0) [B, t], and exp(-top) times sigmoid(x) and sigmoid(x) sigmoid(-x),
  [B, s, t], from the one exponential exp(-|x| - top).
  """
  top = jnp.minimum(jax.lax.stop_gradient(x).max(axis=1), 0.0)
  e = jnp.exp(-jnp.abs(x) - top[:, None])
  t = e * jnp.exp(top)[:, None]  # exp(-|x|)
  r = 1.0 / (1.0 + t)
  return top, jnp.where(x < 0, e * r, r), e * r * r
