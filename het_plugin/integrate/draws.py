"""Which normals are drawn for a softmax: rotated, and around the noise that explains the label.

Rotation. Low-discrepancy points fill their leading coordinates best. With G [T, K] the factors in
logit space and p the softmax of the location, the covariance of the logits as the softmax sees them
is A = G~ diag(p) G~^T [T, T], where G~_tk = G_tk - sum_i p_i G_ti. The subtraction is there because
a softmax does not change if all logits move together. For an orthogonal U whose first columns span
the principal directions of A, z U^T is standard normal, so the estimate stays unbiased for any U
that does not depend on z. The gradient of U is stopped. Two rounds of subspace iteration find the
directions. On a trained head with R = 50 they were as good at S = 64 as an eigendecomposition per
example, while one U for a whole batch gained little. They need products with `NUM_DIRECTIONS`
columns only, and A is never formed.

Fit. The loss needs p(y) = E[softmax(mu + z G)_y] of one label. With z ~ q and the weights
N(z; 0, I) / q(z) the estimate is unbiased for any q that does not depend on z (importance sampling,
as in Glasserman, Heidelberger and Shahabuddin 1999). Its variance is lowest where q is near the
posterior of z, which is softmax(mu + z G)_y N(z; 0, I) up to a constant. The same draws then also
estimate the gradient better, whose mean is over this posterior. The gradient of q is stopped.

Outside the span of a few axes q is N(0, I). In it q is the Gaussian that is closest to the
posterior, KL(q | posterior). With N [m, K] the noise of the logits along the axes,

    E_q[N (e_y - softmax(u))] = mean,    precision = I + E_q[N (diag(p) - p p^T) N^T]

(Opper and Archambeau 2009, "The variational Gaussian approximation revisited"). A few fixed-point
steps with E_q over fixed points find it. They need products with N only. q's tails are lighter than
the posterior's, so only a share of the precision is used (`SHARE`).

Large noise. Where the noise is many times tau, the softmax is near a step function, and far from
the mode the posterior is as wide as N(0, I). The weights then have no variance, and the estimate
collapses. So where the shares of the precision sum to more than `MAX_SHARES`, or the fit does not
settle, the second half of the points is drawn from N(0, I), and every weight is 2 N / (N + q). It
is at most 2 (a defensive mixture, Hesterberg 1995, "Weighted average importance sampling and
defensive mixture distributions").

Axes. Where the posterior differs from N(0, I) is what the label's gradients span. Each axis is the
gradient of log softmax_y at the mode in the span of the axes before it, less its part in that span,
as in a Krylov method. An axis costs one product with G and one with its transpose. The first axes
gain most, so few samples take fewer of them (`num_axes`).

Few samples. Along the axes, logits need N only. So the S draws of the other coordinates are mapped
to logits once, and `POINTS_PER_DRAW` S points along the axes share them (`NestedDraws`): every S-th
point has the same draw, or in turn its negative. That is a problem with S + m factors, the draws
and the axes, in place of T. Many samples take one point each, and the principal directions follow
the axes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from het_plugin.integrate.placement import dims
from het_plugin.integrate.samplers import Sampler

NUM_DIRECTIONS = 8
NUM_ROUNDS = 2
SMALL = 1e-4
MAX_AXES = 6
SMALL_AXIS = 1e-3
POINTS_PER_DRAW = 8
NUM_FIT_STEPS = 3
MAX_STEP = 2.0  # of the mean of q, in standard deviations of the noise
SHARE = 0.4
MAX_SHARES = 6.0  # of the precision, summed over the axes
MAX_LAST_STEP = 1.0  # of a fit, as `MAX_STEP`
MAX_LOOP_CLASSES = 2**12  # up to which the steps of a fit are a loop (`repeated`)
HIGHEST = jax.lax.Precision.HIGHEST  # an axis that is not orthonormal is a bias
# The normals over which a fit takes E_q, [16, MAX_AXES]: the first points of `sobol` for the key 0.
# A program that computes them is larger by a tenth.
FIT_POINTS = np.array([
  [-0.02072, -1.18004, 1.37010, 0.69668, -0.77223, -0.07060],
  [0.15205, 0.21702, -0.67194, -0.09362, 1.89290, 0.62025],
  [-1.89713, 2.18980, -1.10745, -1.47331, -0.01856, -1.24847],
  [1.76096, -0.08013, 0.08102, 0.37815, 0.65980, 1.01558],
  [-0.56816, 0.52005, 0.61990, 1.68248, -1.26578, -0.96858],
  [0.60728, -0.75975, -1.49084, -0.63129, 1.05207, 1.36291],
  [-0.85191, -0.47910, -0.12715, -1.01190, -0.35903, -0.56462],
  [0.68592, 1.06736, 1.02840, 0.16085, 0.28586, 0.09852],
  [-0.21614, 0.76056, -0.32921, 0.61407, 0.68795, -0.32372],
  [0.24234, -0.51931, 1.71379, -1.62731, -2.46473, 0.28566],
  [-1.51493, -1.06196, 0.22272, -0.22496, 0.07215, -0.72033],
  [1.18969, 0.48250, -0.71669, 1.12340, -0.58445, 2.70173],
  [-0.32856, -0.21262, -1.54561, 0.14861, 1.21107, -1.60573],
  [0.46220, 1.18863, 0.37810, -0.76785, -1.08186, 0.86672],
  [-1.05070, 0.08196, 0.77409, -0.35146, 0.37441, -0.17685],
  [0.99530, -2.16978, -0.17965, 1.40267, -0.26201, 0.45873],
])  # fmt: skip


@struct.dataclass
class Root:
  """The root of a matrix that is symmetric and positive definite.

  Attributes:
    lower: the lower triangular L [B, m, m] whose L L^T is the matrix.
    inverse: of L.
  """

  lower: jax.Array
  inverse: jax.Array

  @staticmethod
  def letters() -> 'Root':
    """As in `Draws`."""
    return Root(dims('bmn'), dims('bmn'))

  def solve(self, x: jax.Array) -> jax.Array:
    """y [B, m] of L L^T y = x."""
    half = jnp.einsum('bmn,bn->bm', self.inverse, x, precision=HIGHEST)
    return jnp.einsum('bmn,bm->bn', self.inverse, half, precision=HIGHEST)


@struct.dataclass
class Fit:
  """The Gaussian q of the module docstring.

  Attributes:
    axes: orthonormal [B, m, T]; outside their span q is N(0, I).
    mean: of q along the axes, [B, m].
    root: of the precision of q along the axes.
    is_mixed: [B], 1 for an example with large noise, else 0. It has the points of the mixture.
    num_points: the number of points. The mixture draws the second half of them from N(0, I).
  """

  axes: jax.Array
  mean: jax.Array
  root: Root
  is_mixed: jax.Array
  num_points: int = struct.field(pytree_node=False, default=1)

  def letters(self) -> 'Fit':
    """As in `Draws`."""
    return Fit(dims('bmt'), dims('bm'), Root.letters(), dims('b'), self.num_points)

  @property
  def _num_prior(self) -> int:
    return self.num_points // 2

  def along(self, normals: jax.Array, sample_index: jax.Array) -> jax.Array:
    """Coordinates along the axes [B, s, m] of points with numbers [s], from standard normals of
    that shape.
    """
    normals = normals.astype(self.mean.dtype)
    found = from_q(self.mean, self.root, normals)
    is_prior = (sample_index >= self.num_points - self._num_prior)[:, None]  # [s, 1]
    return jnp.where(is_prior & (self.is_mixed[:, None, None] > 0), normals, found)

  def log_weight(self, along: jax.Array) -> jax.Array:
    """log N(z; 0, I) minus the log-density of the points, [B, s], for coordinates along the axes
    [B, s, m].
    """
    share = self._num_prior / self.num_points
    weight = self._log_weight_of_q(along)
    if not share:
      return weight
    mixed = -jnp.logaddexp(math.log(share), math.log1p(-share) - weight)
    return jnp.where(self.is_mixed[:, None] > 0, mixed, weight)

  def _log_weight_of_q(self, along):
    normals = jnp.einsum('bsm,bmn->bsn', along - self.mean[:, None], self.root.lower)
    log_root = jnp.log(jnp.diagonal(self.root.lower, axis1=-2, axis2=-1)).sum(axis=-1)
    squares = jnp.square(normals) - jnp.square(along)
    return 0.5 * squares.sum(axis=-1) - log_root[:, None]


@struct.dataclass
class Draws:
  """Keys, rotation and fit with which the normals of a batch are drawn.

  Attributes:
    keys: typed PRNG keys [B], one per example, or [1], whose draws all examples share.
    rotation: (V [B, T, m], P [B, m, T]) of U = I - P^T V^T; None for the sampler's own coordinates.
    fit: q, whose axes span the leading coordinates of the rotation; None for N(0, I).
  """

  keys: jax.Array
  rotation: tuple[jax.Array, jax.Array] | None = None
  fit: Fit | None = None

  def letters(self) -> 'Draws':
    """Letters of the dimensions, for `Placement.shard_map`."""
    rotation = None if self.rotation is None else (dims('btm'), dims('bmt'))
    fit = None if self.fit is None else self.fit.letters()
    return Draws(dims('1' if self.keys.shape[0] == 1 else 'b'), rotation, fit)

  def normals(self, sampler: Sampler, sample_index: jax.Array, num_normals: int) -> jax.Array:
    """z [B, s, T], or [1, s, T] if all examples share it."""
    z = sampler(self.keys, sample_index, num_normals)
    if self.fit is None:
      return self._rotated(z)
    count = self.fit.mean.shape[-1]
    along = self.fit.along(z[..., :count], sample_index)
    return self._rotated(z.at[..., :count].set(0.0)) + on_axes(along, self.fit.axes)

  def _rotated(self, z):
    if self.rotation is None:
      return z
    left, right = (x.astype(z.dtype) for x in self.rotation)
    z = jnp.broadcast_to(z, (left.shape[0], *z.shape[1:]))
    along = jnp.einsum('bst,btm->bsm', z, left, precision=HIGHEST)
    return z - jnp.einsum('bsm,bmt->bst', along, right, precision=HIGHEST)

  def log_weight(self, z: jax.Array) -> jax.Array:
    """As of `Fit`, for normals z [B, s, T]."""
    if self.fit is None:
      return jnp.zeros(z.shape[:2], z.dtype)
    along = jnp.einsum('bst,bmt->bsm', z, self.fit.axes, precision=HIGHEST)
    return self.fit.log_weight(along)


@struct.dataclass
class NestedDraws:
  """Draws of a problem whose factors are S draws of the noise and m axes (module docstring).

  Normals are [B, s, S + m]: 1 or -1 for the draw of a point, and its coordinates along the axes.

  Attributes:
    keys: as in `Draws`.
    fit: q.
    num_draws: S.
  """

  keys: jax.Array
  fit: Fit
  num_draws: int = struct.field(pytree_node=False)

  def letters(self) -> 'NestedDraws':
    """As in `Draws`."""
    keys = dims('1' if self.keys.shape[0] == 1 else 'b')
    return NestedDraws(keys, self.fit.letters(), self.num_draws)

  def factors(self, sampler: Sampler) -> jax.Array:
    """Normals [B, S + m, T]: the draws orthogonal to the axes, and the axes."""
    count, num_normals = self.fit.axes.shape[1:]
    # A second sequence: its leading coordinates are the best ones, too.
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(self.keys)
    z = sampler(keys, jnp.arange(self.num_draws), num_normals).astype(self.fit.axes.dtype)
    along = jnp.einsum('bst,bmt->bsm', z, self.fit.axes, precision=HIGHEST)
    z = z - on_axes(along, self.fit.axes)
    return jnp.concatenate([z, self.fit.axes], axis=1)

  def normals(self, sampler: Sampler, sample_index: jax.Array, num_normals: int) -> jax.Array:
    """z [B, s, S + m]; num_normals is S + m."""
    z = sampler(self.keys, sample_index, num_normals - self.num_draws)
    along = self.fit.along(z, sample_index)
    draw = jax.nn.one_hot(sample_index % self.num_draws, self.num_draws, dtype=along.dtype)
    draw *= jnp.where(sample_index // self.num_draws % 2, -1.0, 1.0)[:, None]
    draw = jnp.broadcast_to(draw, (*along.shape[:2], self.num_draws))
    return jnp.concatenate([draw, along], axis=-1)

  def log_weight(self, z: jax.Array) -> jax.Array:
    """As in `Draws`."""
    return self.fit.log_weight(z[..., self.num_draws :])


def from_q(mean: jax.Array, root: Root, normals: jax.Array) -> jax.Array:
  """Coordinates along the axes [B, s, m] of draws from q, from standard normals [B or 1, s, m]."""
  normals = jnp.broadcast_to(normals, (mean.shape[0], *normals.shape[1:]))
  return mean[:, None] + jnp.einsum('bsm,bmn->bsn', normals, root.inverse, precision=HIGHEST)


def num_axes(num_samples: int) -> int:
  """Axes of a fit for S samples: three for every four, and at most `MAX_AXES`."""
  return max(1, min(MAX_AXES, 3 * num_samples // 4))


def on_axes(along: jax.Array, axes: jax.Array) -> jax.Array:
  """Normals [B, s, T] of coordinates [B, s, m] along axes [B, m, T]."""
  return jnp.einsum('bsm,bmt->bst', along, axes, precision=HIGHEST)


def fit(
  to_logits: Callable[[jax.Array], jax.Array],
  location: jax.Array,
  label: jax.Array,
  num_normals: int,
  count: int,
) -> Fit:
  """The fit for labels int32 [B] along `count` axes, or T if that is less; the other arguments are
  those of `principal_directions`.
  """
  is_label = jax.nn.one_hot(label, location.shape[-1], dtype=location.dtype)
  # Of the location, so that inside `jax.shard_map` it is varying: `pull` would sum over devices.
  zero = jnp.zeros_like(location, shape=(location.shape[0], 1, num_normals))
  _, pull = jax.vjp(to_logits, zero)
  p_0 = jax.nn.softmax(location)[:, None]

  def centred(noise):
    """Less what all classes share, which no softmax sees and which would cancel in float32."""
    return noise - jnp.sum(p_0 * noise, axis=-1, keepdims=True)

  def add(i, state):
    axes, noise, mean = state
    p = jax.nn.softmax(location + jnp.einsum('bm,bmk->bk', mean, noise))
    slope = pull((is_label - p)[:, None])[0][:, 0]  # of log softmax_y, [B, T]
    axis = next_axis(axes, slope, i)
    axes = with_row(axes, axis, i)
    noise = with_row(noise, centred(to_logits(axis[:, None]))[:, 0], i)
    along = jnp.einsum('bk,bmk->bm', p, noise)[:, None]
    return axes, noise, newton_step(axes, slope, mean, second_moment(noise, p) - square(along))

  count = min(count, num_normals)
  start = zero, jnp.zeros_like(location)[:, None], zero[:, 0, :1]
  axes, noise, mean = grown(count, location.shape[-1], add, start)

  of_label = jnp.einsum('bk,bmk->bm', is_label, noise)
  rows = jnp.concatenate([noise, jnp.ones_like(noise[:, :1])], axis=1)

  def expectations(at):
    """The gradient of log softmax_y [B, m] and minus its Hessian [B, m, m], for at [B, s, m]."""
    u = location[:, None] + at @ noise
    # Not p: a GPU would write it to memory before the product, which makes e as it reads u.
    e = jnp.exp(u - u.max(axis=-1, keepdims=True))
    sums = jnp.einsum('bsk,bnk->bsn', e, rows)
    along = sums[..., :-1] / sums[..., -1:]
    rate = 1.0 / sums[..., -1]
    average = (e * rate[..., None]).mean(axis=1)
    return of_label - along.mean(axis=1), second_moment(noise, average) - square(along)

  return fit_along(axes, mean, expectations, location.shape[-1])


def repeated(
  count: int, num_classes: int, step: Callable[[int | jax.Array, Any], Any], state: Any
) -> Any:
  """`state` after `step(i, state)` for i = 0 to `count` - 1.

  Up to `MAX_LOOP_CLASSES` the program has one step, in a loop, and a loss compiles in two thirds of
  the time. Above, it has them all. The steps that add axes then work on the axes so far; in a loop,
  on all of them, which costs nothing that can be measured where K is small.
  """
  if num_classes <= MAX_LOOP_CLASSES:
    return jax.lax.fori_loop(0, count, step, state)
  for i in range(count):
    state = step(i, state)
  return state


def grown(
  count: int,
  num_classes: int,
  add: Callable[[int | jax.Array, Any], Any],
  zeros: Any,
) -> Any:
  """`repeated` for steps that add a row to each array of the state (`with_row`).

  `zeros` are arrays [B, 1, ...] of one row of zeros. A loop starts from `count` of them.
  """
  rows = count if num_classes <= MAX_LOOP_CLASSES else 0
  return repeated(
    count, num_classes, add, jax.tree.map(lambda x: jnp.repeat(x, rows, axis=1), zeros)
  )


def with_row(rows: jax.Array, row: jax.Array, i: int | jax.Array) -> jax.Array:
  """Rows [B, m, n] with a row [B, n] as number i: in its place in a loop, else appended."""
  if isinstance(i, int):
    return jnp.concatenate([rows, row[:, None]], axis=1)
  return jnp.where((jnp.arange(rows.shape[1]) == i)[:, None], row[:, None], rows)


def second_moment(rows: jax.Array, weights: jax.Array) -> jax.Array:
  """sum_k w_k n_k n_k^T [B, m, m] of the columns n_k of rows [B, m, K], for weights w [B, K]."""
  # A sum for each pair of rows: a GPU took six times as long for a product of matrices so flat.
  count = rows.shape[1]
  products = [rows[:, i : i + 1] * rows[:, i:] for i in range(count)]
  sums = jnp.einsum('bk,bnk->bn', weights, jnp.concatenate(products, axis=1))
  pairs = np.zeros((count, count), int)
  pairs[np.triu_indices(count)] = np.arange(sums.shape[-1])
  return sums[:, np.maximum(pairs, pairs.T)]


def square(along: jax.Array) -> jax.Array:
  """The mean over points of N p p^T N^T, [B, m, m], for N p = along [B, s, m]."""
  return jnp.einsum('bsm,bsn->bmn', along, along, precision=HIGHEST) / along.shape[1]


def next_axis(axes: jax.Array, slope: jax.Array, i: int | jax.Array) -> jax.Array:
  """The next axis [B, T], of length 1: slope [B, T] less its part in the span of axes [B, m, T].

  The first i axes are orthonormal, and the others are 0.
  """
  # Where nothing is left of the slope but rounding, a constant sets the axis (see `rotation_to`).
  other = jnp.asarray(_other_axes(axes.shape[-1]), slope.dtype)[i]

  size = jnp.linalg.norm(slope, axis=-1, keepdims=True)
  rest = slope / jnp.where(size > 0, size, 1.0) + SMALL_AXIS * other
  for _ in range(2):  # once leaves rounding of the parts that cancel
    along = jnp.einsum('bmt,bt->bm', axes, rest, precision=HIGHEST)
    rest = rest - jnp.einsum('bm,bmt->bt', along, axes, precision=HIGHEST)
  return rest / jnp.linalg.norm(rest, axis=-1, keepdims=True)


@functools.lru_cache(maxsize=16)
def _other_axes(num_normals: int) -> np.ndarray:
  """float32 [MAX_AXES, T], rows of length 1."""
  normals = [np.random.RandomState(i).normal(size=num_normals) for i in range(MAX_AXES)]
  normals = np.array(normals, np.float32)
  return normals / np.linalg.norm(normals, axis=-1, keepdims=True)


def newton_step(
  axes: jax.Array, slope: jax.Array, mean: jax.Array, curvature: jax.Array
) -> jax.Array:
  """The next mode along axes [B, m, T], from the mode [B, m] or [B, m - 1] along those before.

  Args:
    axes: the axes.
    slope: the gradient of log softmax_y, [B, T].
    mean: the mode.
    curvature: minus the Hessian of log softmax_y along the axes, [B, m, m].
  """
  mean = jnp.pad(mean, ((0, 0), (0, axes.shape[1] - mean.shape[1])))
  return mean + clipped(root_of(curvature).solve(jnp.einsum('bmt,bt->bm', axes, slope) - mean))


@jax.jit
def root_of(curvature: jax.Array) -> Root:
  """The root of I + curvature [B, m, m]; I where rounding leaves none. m is at most `MAX_AXES`."""
  eye = jnp.eye(curvature.shape[-1], dtype=curvature.dtype)
  # A GPU's library starts a hundred small kernels for the roots of a loss. On a CPU the sums are no
  # faster, and take longer to compile.
  root = jax.lax.platform_dependent(curvature + eye, cpu=root_by_library, default=root_by_sums)
  is_finite = jnp.isfinite(root.inverse).all(axis=(1, 2), keepdims=True)
  return jax.tree.map(lambda x: jnp.where(is_finite, x, eye), root)


def root_by_library(matrix: jax.Array) -> Root:
  """The root of a matrix [B, m, m], NaN where there is none."""
  lower = jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
  eye = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
  return Root(lower, jax.lax.linalg.triangular_solve(lower, eye, left_side=True, lower=True))


def root_by_sums(matrix: jax.Array) -> Root:
  """As `root_by_library`, as sums of the elements [B] of the matrix."""
  count = matrix.shape[-1]
  zero = jnp.zeros_like(matrix[:, 0, 0])
  lower = []
  inverse = []  # the rows, up to the diagonal

  def dot(x, y):
    return sum((a * b for a, b in zip(x, y, strict=True)), start=zero)

  for i in range(count):
    row = []
    for j in range(i):
      row.append((matrix[:, i, j] - dot(row, lower[j][:j])) * inverse[j][j])
    rate = 1.0 / jnp.sqrt(matrix[:, i, i] - dot(row, row))
    columns = [[inverse[k][j] for k in range(j, i)] for j in range(i)]
    inverse.append([-rate * dot(row[j:], column) for j, column in enumerate(columns)] + [rate])
    lower.append([*row, 1.0 / rate])

  def stacked(rows):
    rows = [jnp.stack([*row, *[zero] * (count - len(row))], axis=-1) for row in rows]
    return jnp.stack(rows, axis=-2)

  return Root(stacked(lower), stacked(inverse))


def clipped(step: jax.Array) -> jax.Array:
  """Steps [B, m], no longer than `MAX_STEP`; 0 where they are not finite."""
  step = jnp.where(jnp.isfinite(step).all(axis=-1, keepdims=True), step, 0.0)
  length = jnp.linalg.norm(step, axis=-1, keepdims=True)
  return step * jnp.minimum(1.0, MAX_STEP / jnp.where(length > 0, length, 1.0))


def fit_along(
  axes: jax.Array,
  mean: jax.Array,
  expectations: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
  num_classes: int,
) -> Fit:
  """The fit in the span of axes [B, m, T], from the mode along them [B, m], the expectations that
  `fit` defines, and K.
  """
  points = jnp.asarray(FIT_POINTS[None, :, : axes.shape[1]], mean.dtype)

  def shares(curvature):
    return SHARE * jnp.trace(curvature, axis1=1, axis2=2)

  def move(_, state):
    mean, root, largest, _, _ = state
    slope, curvature = expectations(from_q(mean, root, points))
    # Of all steps, because far out the softmax may be flat.
    root = root_of(curvature)
    largest = jnp.maximum(largest, shares(curvature))
    step = clipped(root.solve(slope - mean))
    return mean + step, root, largest, step, curvature

  curvature = expectations(mean[:, None])[1]
  start = mean, root_of(curvature), shares(curvature), jnp.zeros_like(mean), curvature
  # No loop until it settles, in which devices would wait for each other.
  mean, _, largest, step, curvature = repeated(NUM_FIT_STEPS, num_classes, move, start)
  # Also where they are not finite, and where the mean does not settle: there the softmax is a step.
  is_good = (largest <= MAX_SHARES) & (jnp.linalg.norm(step, axis=-1) <= MAX_LAST_STEP)
  is_mixed = 1 - is_good.astype(mean.dtype)
  return jax.lax.stop_gradient(Fit(axes, mean, root_of(SHARE * curvature), is_mixed))


def principal_directions(
  to_logits: Callable[[jax.Array], jax.Array], location: jax.Array, num_normals: int
) -> jax.Array:
  """The principal directions of A, [B, m, T], neither orthogonal nor of length 1.

  Args:
    to_logits: the linear map from normals [B, m, T] to the noise of the logits over tau [B, m, K].
    location: location of the logits over tau [B, K].
    num_normals: T.
  """
  p = jax.nn.softmax(location)[:, None]

  def multiply(directions):
    noise, pull = jax.vjp(to_logits, directions)
    weighted = p * (noise - jnp.sum(p * noise, axis=-1, keepdims=True))
    return pull(weighted - p * weighted.sum(axis=-1, keepdims=True))[0]

  # Varying, as in `fit`.
  return directions_of(multiply, jnp.zeros_like(location[:, :1, None]), num_normals)


def directions_of(
  multiply: Callable[[jax.Array], jax.Array], zero: jax.Array, num_normals: int
) -> jax.Array:
  """`principal_directions` from products with A: multiply(directions [B, m, T]); zero [B, 1, 1] has
  the dtype.
  """
  count = min(NUM_DIRECTIONS, num_normals)
  # A constant of the program, which then needs no keys; NumPy promises that its values stay.
  start = np.random.RandomState(0).normal(size=(count, num_normals)).astype(np.float32)
  directions = jnp.asarray(start, zero.dtype) + zero
  for _ in range(NUM_ROUNDS):
    directions = multiply(directions)
    largest = jnp.abs(directions).max(axis=(1, 2), keepdims=True)
    directions /= jnp.where(largest > 0, largest, 1.0)
  return jax.lax.stop_gradient(directions)


def rotation_to(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The rotation of `Draws` whose leading columns span rows [B, m, T] (Householder reflections).

  Where a row is nearly in the span of those before it, the rest of it is rounding. A coordinate of
  `SMALL` of its length then sets the column, so that an estimate does not depend on rounding: with
  none, p moved by 5e-5 to 0.07 where the input moved by 1e-7 (HET-XL, R = 5, K = 10).
  """
  batch, count, num_normals = rows.shape
  place = jnp.arange(num_normals)

  def reflect(j, state):
    rows, left, right = state
    row = rows[:, j]
    is_j = place == j
    x = jnp.where(place < j, 0.0, row)  # [B, T]
    sign = jnp.where(x[:, j] < 0, -1.0, 1.0)
    x = x + jnp.where(is_j, (SMALL * sign * jnp.linalg.norm(row, axis=-1))[:, None], 0.0)
    v = x + jnp.where(is_j, (sign * jnp.linalg.norm(x, axis=-1))[:, None], 0.0)
    length = jnp.linalg.norm(v, axis=-1, keepdims=True)
    v = v / jnp.where(length > 0, length, 1.0)
    along = jnp.einsum('bmt,bt->bm', rows, v, precision=HIGHEST)
    rows = rows - 2.0 * along[:, :, None] * v[:, None]
    # U (I - 2 v v^T) = U - p v^T with p = 2 U v
    along = jnp.einsum('btm,bt->bm', left, v, precision=HIGHEST)
    p = v - jnp.einsum('bm,bmt->bt', along, right, precision=HIGHEST)
    is_column = jnp.arange(count) == j  # in place of a scatter, for which ONNX has no word
    left = jnp.where(is_column, v[:, :, None], left)
    return rows, left, jnp.where(is_column[:, None], 2.0 * p[:, None], right)

  # A loop, since a program with every reflection is several times as large.
  start = rows, jnp.zeros_like(rows, shape=(batch, num_normals, count)), jnp.zeros_like(rows)
  return jax.lax.fori_loop(0, count, reflect, start)[1:]


def orthonormal(rows: jax.Array) -> jax.Array:
  """Orthonormal rows [B, m, T], m <= T, that span the rows given; also where those span less."""
  left, right = rotation_to(rows)
  count, num_normals = rows.shape[1:]
  along = jnp.einsum('bmn,bnt->bmt', left[:, :count], right, precision=HIGHEST)
  return jnp.eye(count, num_normals, dtype=rows.dtype) - along
