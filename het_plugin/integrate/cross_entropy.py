"""Cross-entropy of a linear classifier in tiles of classes: a loss for any trainer.

    u = phi W + b [N, K],    t [N, K] the targets, T = sum_k t_k

    softmax   loss = T log sum_k exp(u_k) - sum_k t_k u_k,    d loss / d u_k = T p_k - t_k
    sigmoid   loss = sum_k log(1 + exp(u_k)) - t_k u_k,       d loss / d u_k = sigmoid(u_k) - t_k

The sums over classes are those of `classes.EveryClass`, of one row of logits for each example. With
K cut over devices, each one sums over its own classes, and three numbers per example are combined
once.

N examples, K classes (k of this device, t of a tile), D pre-logits, L labels per example.
"""

import contextlib
import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import meta
from flax.linen import partitioning as flax_partitioning
from jax import core, lax
from jax.sharding import AxisType, PartitionSpec, reshard

from het_plugin.integrate.classes import Classes, EveryClass, MaybeArray, Terms, Tile, Tiling
from het_plugin.integrate.gaussian import GaussianLogits, Linear, Link, LowRank
from het_plugin.integrate.integrator import AnyIntegrator, Integrator, check_labels
from het_plugin.integrate.placement import (
  Placement,
  mesh_axes,
  num_examples,
  num_shards,
  varying_alike,
)
from het_plugin.system import ranges
from het_plugin.system.ranges import Count, NotNegative, Rate

TILE_BYTES = 2**24  # of a tile's logits and columns of W, and their gradients
MIN_TILE = 512

Axes = str | tuple[str, ...] | None
Targets = Callable[..., Any]  # int32 [t] and arrays -> targets [N, t]


def cross_entropy(
  phi: jax.Array,
  kernel: jax.Array,
  bias: jax.Array | None,
  labels: jax.Array | Targets,
  link: Link = 'softmax',
  *,
  weights: jax.Array | None = None,
  label_arrays: Sequence[jax.Array] = (),
  label_smoothing: jax.Array | float = 0.0,
  z_loss: jax.Array | float = 0.0,
  temperature: jax.Array | float = 1.0,
  noise: LowRank | None = None,
  keys: jax.Array | None = None,
  integrator: AnyIntegrator | None = None,
  num_classes: int | None = None,
  batch_axes: Axes = None,
  class_axes: Axes = None,
  tile: int | None = None,
) -> jax.Array:
  """Cross-entropy of the logits (phi W + b) / tau, in tiles of classes: never of all at one time.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin import cross_entropy
      >>> phi, kernel, bias = jnp.ones((4, 8)), jnp.zeros((8, 50_000)), jnp.zeros(50_000)
      >>> labels = jnp.array([3, 49_999, 0, -1])  # -1 is padding
      >>> loss = jax.jit(cross_entropy)(phi, kernel, bias, labels)
      >>> [round(float(x), 4) for x in loss]
      [10.8198, 10.8198, 10.8198, 0.0]

  A mesh cuts K over `class_axes` and the examples over `batch_axes`. With explicit axes
  (`jax.make_mesh`) both are read from the arrays. With automatic axes (`jax.set_mesh` of a `Mesh`)
  name them, or bind flax's logical axes 'vocab' and 'batch'. Inside `jax.shard_map` over
  `class_axes`, name them and give each device its columns of W. An axis that cuts both the examples
  and K cuts K. No device has logits of more than its own classes.

  Products are in the dtype of phi, and sums in float32 or wider: phi in bfloat16 and W in float32
  give W a float32 gradient without a copy of W in bfloat16. Labels, weights, label_smoothing and
  z_loss have no gradient. Forward mode alone (`jax.jvp`) is refused by JAX where there are tiles.
  Forward mode over the gradient needs phi and W in float32.

  Args:
    phi: pre-logits [..., D].
    kernel: W [D, K].
    bias: b [K], or None.
    labels: class ids, integers [...] or [..., L]; a negative one is padding. For soft labels, a
      function that takes a range of classes, int32 [t], and returns targets [N, t]; N is the
      product of the other dimensions of phi.
    link: 'softmax' or 'sigmoid'.
    weights: targets of the labels, as many. None is 1 / the number of the example's labels for a
      softmax, so that the loss is the mean over them, and 1 for a sigmoid.
    label_arrays: arrays [..., n] that a function of labels gets after the classes, as [N, n], cut
      over devices as phi is. What else it reads must be the same on all devices.
    label_smoothing: a in [0, 1). Targets t become (1 - a) t + a T / K for a softmax, with T their
      sum, and (1 - a) t + a / 2 for a sigmoid. Both this and z_loss may follow a schedule: under
      `jax.jit` their ranges are not looked at.
    z_loss: adds z_loss (log sum_k exp(u_k))^2 for examples with labels (PaLM, section 5).
    temperature: tau, one positive number.
    noise: noise in the space of phi [B, D], as HET-XL has it. The loss is then that of
      `Integrator.nll`: labels are ids, without weights, smoothing and z-loss, and phi is [B, D].
    keys: [B], as `Integrator.nll` takes them; with noise only.
    integrator: with noise only; None is `Integrator()`.
    num_classes: K, if W and b have more columns so that a mesh divides them.
    batch_axes: mesh axis or axes of the first dimension of phi.
    class_axes: mesh axis or axes of K.
    tile: classes of a tile; None takes those whose arrays have about 16 MB. Without noise only.

  Returns:
    [...], float32 or wider; 0 for examples without labels, and NaN (under `jax.jit`, where labels
    cannot be looked at) for those with a label that is not below K.

  Raises:
    ValueError: shapes, labels or settings do not fit together.
  """
  phi = jnp.asarray(phi)
  kernel = jnp.asarray(kernel)
  bias = None if bias is None else jnp.asarray(bias)
  if hasattr(temperature, '__jax_array__'):  # a parameter of nnx
    temperature = jnp.asarray(temperature)
  _check_arrays(phi, kernel, bias, temperature, label_arrays)
  sharding = Sharding.of(phi, kernel, batch_axes, class_axes)
  num_columns = kernel.shape[-1] * sharding.num_parts
  num_classes = num_columns if num_classes is None else num_classes
  settings = Settings(link, num_classes, _number(label_smoothing), _number(z_loss), tile)
  if num_classes > num_columns:
    raise ValueError(
      f'cross_entropy: num_classes={num_classes} must be from 1 to the {num_columns} columns of '
      'the kernel'
    )
  if noise is not None:
    others = settings.label_smoothing, settings.z_loss, settings.tile, label_arrays
    is_plain = weights is None and not any(map(_is_set, others))
    if not (is_plain and phi.ndim == 2) or callable(labels):
      raise ValueError(
        'cross_entropy: with noise, labels are ids of pre-logits [B, D], without weights, '
        f'label_smoothing, z_loss and tile; got phi {phi.shape} and {settings}: leave them out'
      )
    found = jnp.shape(noise.diag) if isinstance(noise, LowRank) else type(noise).__name__
    if found != phi.shape:
      raise ValueError(
        f'cross_entropy: noise must be a LowRank with diag {phi.shape} as phi; got {found}'
      )
    if not isinstance(integrator, AnyIntegrator | None):
      raise ValueError(f'cross_entropy: integrator={integrator!r} must be an Integrator or None')
    logits = _noisy(phi, kernel, bias, link, temperature, noise, num_classes)
    with sharding.axis_rules():
      return (integrator or Integrator()).nll(logits, labels, keys)
  if keys is not None or integrator is not None:
    raise ValueError('cross_entropy: keys and integrator have no effect without noise: leave them')
  of_labels = make_labels(phi, labels, weights, label_arrays, settings)
  phi = _over(phi, temperature)
  bias = None if bias is None else _over(bias, temperature)
  loss = sharding.run(functools.partial(_loss, settings), phi, kernel, bias, of_labels)
  if isinstance(of_labels, Soft):
    return loss
  return jnp.where((of_labels.ids < num_classes).all(axis=-1), loss, jnp.nan)


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is static under `jax.jit`; as the arguments of `cross_entropy`."""

  link: Link
  num_classes: Count
  label_smoothing: Rate = 0.0  # this and the next one may be traced; the loss has them by `Labels`
  z_loss: NotNegative = 0.0
  tile: Count | None = None

  def __post_init__(self):
    ranges.check(self, 'cross_entropy', is_open=_is_traced)
    if _is_set(self.z_loss) and self.link == 'sigmoid':
      raise ValueError(
        f"cross_entropy: z_loss={self.z_loss} needs the link 'softmax': leave it out"
      )

  def tile_size(self, phi: jax.Array, kernel: jax.Array) -> int:
    """Classes of a tile for phi [N, D] and W [D, k], at most k."""
    num_classes = kernel.shape[-1]
    if self.tile is not None:
      return min(self.tile, num_classes)
    # Of a tile there are logits and columns of W, and the gradients of both.
    num_values = 2 * (num_examples(phi.shape[0]) + kernel.shape[0])
    size = TILE_BYTES // (num_values * _wide(phi.dtype).itemsize)
    return min(max(MIN_TILE, 2 ** max(0, size.bit_length() - 1)), num_classes)


@struct.dataclass
class Ids:
  """Labels as class ids.

  Attributes:
    ids: int32 [..., L], negative at padding.
    weights: targets [..., L], 0 at padding.
    smoothing: label_smoothing of each example [..., 1]; None is 0.
    z_loss: the same of z_loss.
  """

  ids: jax.Array
  weights: jax.Array
  smoothing: MaybeArray = None
  z_loss: MaybeArray = None

  def targets(self, settings: Settings, classes: jax.Array, like: jax.Array) -> jax.Array:
    """t [N, t] of a range of classes int32 [t], as `like`."""
    of_labels = jnp.where(self.ids[..., None] == classes, self.weights[..., None], 0.0)  # [N, L, t]
    if settings.link == 'softmax':
      t = of_labels.sum(axis=1)
      of_all = self.weights.sum(axis=-1, keepdims=True) / settings.num_classes
    else:
      t = of_labels.max(axis=1, initial=0)  # a class that is listed twice is one label
      of_all = 0.5
    if self.smoothing is not None:
      t += self.smoothing * (of_all - t)
    return t.astype(like.dtype)


@struct.dataclass
class Soft:
  """Labels as a function int32 [t] -> targets [..., t] of a range of classes.

  Attributes:
    arrays: what the function gets after the classes.
    function: the function.
    z_loss: as in `Ids`.
  """

  arrays: tuple[jax.Array, ...]
  function: Targets = struct.field(pytree_node=False)
  z_loss: MaybeArray = None

  def targets(self, settings: Settings, classes: jax.Array, like: jax.Array) -> jax.Array:
    """t [N, t] of a range of classes int32 [t], as `like`."""
    t = lax.stop_gradient(self.function(classes, *self.arrays))
    if jnp.shape(t) != like.shape:
      raise ValueError(
        f'cross_entropy: labels must return {like.shape} for {classes.shape[0]} classes; got '
        f'{jnp.shape(t)}'
      )
    return t.astype(like.dtype)


Labels = Ids | Soft


def make_labels(
  phi: jax.Array,
  labels: jax.Array | Targets,
  weights: jax.Array | None,
  arrays: Sequence[jax.Array],
  settings: Settings,
) -> Labels:
  """The arguments of `cross_entropy` as `Labels`.

  Raises:
    ValueError: they do not fit together.
  """
  rows = phi.shape[:-1]

  def of_rows(x: Any) -> MaybeArray:
    if not _is_set(x):
      return None
    return jnp.broadcast_to(lax.stop_gradient(jnp.asarray(x, _wide(phi.dtype))), (*rows, 1))

  z_loss = of_rows(settings.z_loss)
  if callable(labels):
    if weights is not None or _is_set(settings.label_smoothing):
      raise ValueError(
        'cross_entropy: weights and label_smoothing have no effect on a function of classes: let '
        'it return the targets that you want'
      )
    arrays = tuple(map(jnp.asarray, arrays))
    arrays = tuple(x.reshape(*rows, math.prod(x.shape[len(rows) :])) for x in arrays)
    return Soft(arrays, labels, z_loss)
  if arrays:
    raise ValueError('cross_entropy: label_arrays need labels that are a function of classes')
  if weights is not None and np.shape(weights) != np.shape(labels):
    raise ValueError(
      f'cross_entropy: weights must be as many as labels, {np.shape(labels)}; got '
      f'{np.shape(weights)}'
    )
  or_what = ', or a function of a range of classes'
  ids = check_labels(labels, rows, settings.num_classes, settings.link, or_what)
  listed = (ids >= 0).astype(_wide(phi.dtype))
  if weights is not None:
    weights = jnp.asarray(weights, listed.dtype).reshape(ids.shape) * listed
  elif settings.link == 'softmax':
    weights = listed / jnp.maximum(listed.sum(axis=-1, keepdims=True), 1.0)
  else:
    weights = listed
  return Ids(ids, lax.stop_gradient(weights), of_rows(settings.label_smoothing), z_loss)


def _loss(
  settings: Settings,
  axes: tuple[str, ...],
  phi: jax.Array,
  kernel: jax.Array,
  bias: jax.Array | None,
  labels: Labels,
) -> jax.Array:
  """The loss [...] from the classes of this device; `axes` have the other classes."""
  rows = phi.shape[:-1]
  wide = _wide(phi.dtype)
  phi = phi.reshape(-1, phi.shape[-1])
  labels = jax.tree.map(lambda x: x.reshape(phi.shape[0], x.shape[-1]), labels)
  vectors = phi.astype(wide)[:, None]
  bias = None if bias is None else bias.astype(wide)
  classes = Classes(vectors=vectors, kernel=kernel, bias=bias, dtype=phi.dtype)
  classes, constants = varying_alike((classes, labels))
  placement = Placement(vocab=axes or None)
  tiling = Tiling(settings.tile_size(phi, kernel), settings.num_classes, placement)
  found = EveryClass(tiling, classes, constants).sums(functools.partial(_terms, settings))
  if settings.link == 'sigmoid':
    return found.sums.reshape(rows)
  at, t = found.sums
  t = labels.weights.sum(axis=-1) if isinstance(labels, Ids) else t  # equal up to rounding
  top = found.top[:, 0]
  log_total = found.log_total[:, 0]
  # u - maximum is exact: losses near 0 keep their digits.
  loss = t * log_total - (at - t * top)
  if labels.z_loss is not None:
    loss += labels.z_loss[:, 0] * jnp.where(t > 0, jnp.square(top + log_total), 0.0)
  return loss.reshape(rows)


def _terms(settings: Settings, tile: Tile) -> Terms:
  """Of the sums of exp(u), t u and t, or of the loss of a sigmoid."""
  labels = tile.constants
  rows = tile.logits()  # [N, 1, t]
  u = rows[:, 0]
  is_one = isinstance(labels, Ids) and labels.ids.shape[-1] == 1
  if is_one and settings.link == 'softmax' and labels.smoothing is None:
    at = tile.at(rows, labels.ids)[:, 0, 0]
    return Terms(rows, (labels.weights[:, 0] * at, None))
  t = jnp.where(tile.counts, labels.targets(settings, tile.ids, u), 0.0)
  if settings.link == 'sigmoid':
    of_class = jnp.maximum(u, 0.0) - t * u + jnp.log1p(jnp.exp(-jnp.abs(u)))
    return Terms(sums=of_class.sum(axis=-1))
  total = None if isinstance(labels, Ids) else t.sum(axis=-1)
  return Terms(rows, ((t * u).sum(axis=-1), total))


@dataclasses.dataclass(frozen=True)
class Sharding:
  """How examples and classes are cut over devices.

  Attributes:
    mesh: the active mesh; None without one.
    rows: axes of each dimension of phi but the last.
    classes: axes of K.
    manual: axes of a surrounding `jax.shard_map`, which has cut the arrays already.
  """

  mesh: Any = None
  rows: tuple[tuple[str, ...], ...] = ()
  classes: tuple[str, ...] = ()
  manual: frozenset[str] = frozenset()

  @classmethod
  def of(cls, phi: jax.Array, kernel: jax.Array, batch_axes: Axes, class_axes: Axes) -> 'Sharding':
    """The sharding of arrays on the active mesh.

    Raises:
      ValueError: the mesh has no such axes, or does not divide K.
    """
    mesh = _mesh_of(kernel)
    shape = {} if mesh is None else mesh.shape
    for name, axes in (('batch_axes', batch_axes), ('class_axes', class_axes)):
      if unknown := [x for x in _names(axes) if x not in shape]:
        raise ValueError(
          f'cross_entropy: {name}={axes!r} names {unknown[0]!r}, which is no axis of the active '
          f'mesh ({", ".join(shape) or "there is none"}): set one with jax.set_mesh'
        )
    classes = _names(class_axes) or _names(_spec(kernel)[-1]) or _names(mesh_axes('vocab'))
    rows = [_names(axes) for axes in _spec(phi)[:-1]]
    if rows and batch_axes is not None:
      rows[0] = _names(batch_axes)
    elif rows and not any(rows) and phi.shape[0] % num_shards('batch') == 0:
      rows[0] = _names(mesh_axes('batch'))
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    rows = tuple(tuple(x for x in axes if x not in {*classes, *manual}) for axes in rows)
    found = cls(mesh, rows, classes, manual)
    parts = math.prod(shape[x] for x in classes if x not in manual)
    if kernel.shape[-1] % parts:
      raise ValueError(
        f'cross_entropy: the mesh cuts the {kernel.shape[-1]} columns of the kernel into {parts} '
        'parts: add columns up to a multiple, and give num_classes'
      )
    return found

  @property
  def num_parts(self) -> int:
    """How many times as many classes there are as `kernel` has columns."""
    return math.prod(self.mesh.shape[x] for x in self.classes if x in self.manual)

  def axis_rules(self) -> contextlib.AbstractContextManager:
    """flax's rules for the integrator, where axes are known."""
    if self.mesh is None or self.manual:
      return contextlib.nullcontext()
    rules = (('batch', self.rows[0] or None), ('vocab', self.classes or None))
    return flax_partitioning.axis_rules(rules)

  def run(
    self,
    function: Callable[..., jax.Array],
    phi: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    labels: Labels,
  ) -> jax.Array:
    """function(class axes, phi, W, b, labels) of each device's part, [...] as phi."""
    function = functools.partial(function, self.classes)
    own = tuple(x for x in self.classes if x not in self.manual)
    names = {*own, *(x for axes in self.rows for x in axes)}
    if not names:
      return function(phi, kernel, bias, labels)
    rows = PartitionSpec(*(axes or None for axes in self.rows))
    specs = rows, PartitionSpec(None, own or None), PartitionSpec(own or None), rows
    args = phi, kernel, bias, labels
    is_explicit = bool(names & {*_explicit_axes(self.mesh)})
    if is_explicit:
      args = [
        jax.tree.map(lambda x, s=s: reshard(x, s), y) for s, y in zip(specs, args, strict=True)
      ]
    part = functools.partial(jax.shard_map, mesh=self.mesh, axis_names=names)
    mapped = part(function, in_specs=specs, out_specs=rows)
    if self.manual:
      mapped = _with_own_gradient(mapped, function, part, specs)
    loss = mapped(*args)
    return reshard(loss, PartitionSpec(*_spec(phi)[:-1])) if is_explicit else loss


def _with_own_gradient(
  mapped: Callable[..., jax.Array],
  function: Callable[..., jax.Array],
  part: Callable[..., Any],
  specs: tuple,
) -> Callable[..., jax.Array]:
  """`mapped`, which is part(function), with a gradient that makes it once more.

  Inside a `jax.shard_map` over other axes, JAX itself cannot keep values of one for the gradient.
  """

  def pull(phi, kernel, bias, labels, g):
    return jax.vjp(lambda *x: function(*x, labels), phi, kernel, bias)[1](g)

  def backward(args, g):
    gradient = part(pull, in_specs=(*specs, specs[0]), out_specs=specs[:3])
    return *gradient(*args, g), None

  mapped = jax.custom_vjp(mapped)
  mapped.defvjp(lambda *args: (mapped(*args), args), backward)
  return mapped


def _mesh_of(kernel: jax.Array) -> Any:
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    mesh = jax.typeof(kernel).sharding.mesh
  return meta.get_global_mesh() if mesh.empty else mesh


def _spec(x: jax.Array) -> tuple:
  """The mesh axes of each dimension, as far as types have them."""
  spec = tuple(jax.typeof(x).sharding.spec)
  return spec + (None,) * (x.ndim - len(spec))


def _explicit_axes(mesh: Any) -> list[str]:
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return [name for name, kind in types if kind == AxisType.Explicit]


def _names(axes: Any) -> tuple[str, ...]:
  return () if axes is None else tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _noisy(
  phi: jax.Array,
  kernel: jax.Array,
  bias: jax.Array | None,
  link: Link,
  temperature: jax.Array | float,
  noise: LowRank,
  num_classes: int,
) -> GaussianLogits:
  """HET-XL's logits. A loss in tiles never reads their location."""
  dtype = _wide(phi.dtype)
  bias = jnp.zeros_like(kernel, dtype, shape=kernel.shape[-1:]) if bias is None else bias
  location = jnp.matmul(phi, kernel.astype(phi.dtype), preferred_element_type=dtype) + bias
  linear = Linear(kernel, phi, bias)
  return GaussianLogits(location, noise, linear, jnp.asarray(temperature, dtype), num_classes, link)


def _over(x: jax.Array, temperature: jax.Array | float) -> jax.Array:
  wide = _wide(x.dtype)
  return (x.astype(wide) / jnp.asarray(temperature, wide)).astype(x.dtype)


def _wide(dtype: Any) -> np.dtype:
  """float32, or float64 of float64; also where dtypes are not promoted."""
  return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _check_arrays(
  phi: jax.Array,
  kernel: jax.Array,
  bias: jax.Array | None,
  temperature: jax.Array | float,
  label_arrays: Sequence[jax.Array],
) -> None:
  arrays = (phi, kernel) if bias is None else (phi, kernel, bias)
  fits = kernel.ndim == 2 and phi.ndim >= 1 and phi.shape[-1] == kernel.shape[0]
  fits = fits and (bias is None or bias.shape == kernel.shape[1:])
  if not fits or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
    raise ValueError(
      'cross_entropy: phi must be [..., D], kernel [D, K] and bias [K] or None, of floating types; '
      f'got {", ".join(f"{x.dtype} {x.shape}" for x in arrays)}'
    )
  is_number = isinstance(temperature, (numbers.Real, np.ndarray, jax.Array))
  is_one = is_number and np.size(temperature) == 1
  # By NumPy: under `jax.jit`, JAX would trace the comparison.
  is_known = is_one and not isinstance(temperature, core.Tracer)
  if not is_one or (is_known and not 0 < np.asarray(temperature) < math.inf):
    raise ValueError(f'cross_entropy: temperature={temperature!r} must be one positive number')
  rows = phi.shape[:-1]
  shapes = jax.tree.map(np.shape, label_arrays)
  if not isinstance(label_arrays, (tuple, list)) or any(x[: len(rows)] != rows for x in shapes):
    raise ValueError(
      f'cross_entropy: label_arrays must be a tuple of arrays {(*rows, "n")}; got {shapes}'
    )


def _number(x: Any) -> Any:
  """An array of one number that is known as that number; else x itself."""
  is_array = isinstance(x, (np.ndarray, jax.Array)) and x.ndim == 0
  return np.asarray(x).item() if is_array and not isinstance(x, core.Tracer) else x


def _is_traced(x: Any) -> bool:
  """Whether x is one number that only the run knows."""
  return isinstance(x, core.Tracer) and x.ndim == 0


def _is_set(x: Any) -> bool:
  """Whether x is or may be other than 0 and nothing."""
  return _is_traced(x) or bool(x)
