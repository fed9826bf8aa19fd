"""Rows that stay on disk, for fits beyond the memory.

A search sees a `Stream` as it sees `objective.Blocks`: the objective and its gradient are sums over
blocks of rows, in the same order, so that both give the same digits. The rows are read in chunks
of blocks. The search starts with a tenth of them, and goes on with more and more: each part is
fitted as well as its number of rows can tell the parameters, so that the whole is read few times.
The rows of a part are runs of neighbours, evenly spaced.
"""

import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.estimators import inputs, lbfgs, objective, placement, targets
from het_plugin.estimators.model import Model
from het_plugin.integrate import Draws, shared_key
from het_plugin.system import stopping

SHARES = (0.1, 0.2, 0.4, 1.0)
CHUNK_BYTES = 2**23  # of features that are read at a time
HELD_BYTES = 2**27  # a part whose features and draws take less is read once
RUN_ROWS = 256
GAP_SHARE = 0.1  # of the price p / (2 n) of p parameters, to which n of more rows are fitted
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are evenly spaced


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
  """Rows of positive weight, read when they are asked for.

  Attributes:
    x: [N, D], mapped or in memory.
    values: `Targets.values` of all rows.
    weight: [N].
    numbers: int [n], the rows of positive weight; None for all.
    mean: [D], subtracted from the features.
    far: whose rows are moved.
    strength, noise_strength: 1 / C and 1 / C_noise.
    size: rows of a block.
    mesh: (data, model) numbers of devices.
    order: int [m], the places in `numbers` of a part; None for the whole.
    spilled: draws of the rows, in a file without a name.
  """

  x: Any
  values: np.ndarray
  weight: np.ndarray
  numbers: np.ndarray | None
  mean: np.ndarray
  far: inputs.Far
  strength: jax.Array
  noise_strength: jax.Array
  size: int
  mesh: Sequence[int] | None = None
  order: np.ndarray | None = None
  spilled: '_Spilled | None' = None

  def __len__(self) -> int:
    if self.order is not None:
      return len(self.order)
    return len(self.x if self.numbers is None else self.numbers)

  @property
  def width(self) -> int:
    """D."""
    return self.x.shape[1]

  @functools.cached_property
  def total(self) -> jax.Array:
    """The sum of the weights."""
    weight = self.weight
    if self.order is not None:
      weight = weight[self.order if self.numbers is None else self.numbers[self.order]]
    return jnp.float32(weight.sum())

  @property
  def scales(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As of `objective.Blocks`."""
    return self.total, self.strength, self.noise_strength

  @functools.cached_property
  def _stamps(self) -> list[tuple[str, int, int]]:
    return inputs.stamps(self.x)

  def _read(self, places: slice | np.ndarray, num_blocks: int | None = None) -> objective.Blocks:
    """Rows at places of the part, in blocks."""
    for path, *stamp in self._stamps:
      if not os.path.exists(path) or inputs.stamp(path) != tuple(stamp):
        raise ValueError(f'{path} has changed during the fit, which reads it often: start again')
    if self.mesh is None:
      blocks = self._blocks(places, self.size, num_blocks)
    else:
      places = np.arange(places.start, places.stop) if isinstance(places, slice) else places
      num_blocks = num_blocks or -(-len(places) // self.size)
      size = self.size // self.mesh[0]
      blocks = placement.cut_rows(
        lambda some: self._blocks(places[some], size, num_blocks),
        *(len(places), num_blocks, self.size, self.mesh),
      )
    placement.forget_pages(self.x)
    placement.forget_pages(self.values)
    return blocks

  def _blocks(
    self, places: slice | np.ndarray, size: int, num_blocks: int | None
  ) -> objective.Blocks:
    rows = places if self.order is None else self.order[places]
    rows = rows if self.numbers is None else self.numbers[rows]
    x = inputs.widened(np.asarray(self.x[rows]))
    moved = self.far.moved
    if len(moved):
      number = np.arange(rows.start, rows.start + len(x)) if isinstance(rows, slice) else rows
      place = np.minimum(np.searchsorted(moved, number), len(moved) - 1)
      is_moved = moved[place] == number
      x = np.array(x)
      x[is_moved] = self.far.values[place[is_moved]]
    values = np.asarray(self.values[rows])
    of_rows = x, self.mean, values, self.weight[rows], size, num_blocks
    constants = {'total': self.total, 'strength': self.strength}
    return objective.make_blocks(*of_rows, **constants, noise_strength=self.noise_strength)

  def chunks(self) -> Iterator[objective.Blocks]:
    """All rows of the part, in their order.

    Raises:
      lbfgs.StoppedError: this process was asked to stop.
      ValueError: a file has changed.
    """
    total = -(-len(self) // self.size)
    num_chunks = -(-total // max(1, CHUNK_BYTES // (4 * self.size * self.width)))
    num_blocks = -(-total // num_chunks)
    step = num_blocks * self.size
    for number, start in enumerate(range(0, len(self), step)):
      if stopping.agreed():
        raise lbfgs.StoppedError
      chunk = self._read(slice(start, min(start + step, len(self))), num_blocks)
      yield chunk if self.spilled is None else self.spilled.of(number, chunk)

  @functools.cached_property
  def _samples(self) -> dict[int, objective.Blocks]:
    return {}

  def some(self, num_rows: int) -> objective.Blocks:
    """About `num_rows` rows, evenly spaced, which stay in memory."""
    padded = -(-len(self) // self.size) * self.size
    stride = max(1, padded // num_rows)
    if stride not in self._samples:
      self._samples[stride] = self._read(np.arange(0, len(self), stride))
    return self._samples[stride]

  def drawn(self, model: Model, params: dict) -> 'Stream':
    """As `objective.Blocks.drawn`; the draws are in a temporary file."""
    if not model.is_sampled:
      return self
    spilled = _Spilled()
    for chunk in dataclasses.replace(self, spilled=None).chunks():
      draws = chunk.drawn(model, params).draws
      if draws is None or draws.rotation is None:
        return self  # the same draws for all rows
      spilled.write(draws.rotation)
    return dataclasses.replace(self, spilled=spilled)

  def stages(self, model: Model) -> Iterator[tuple[Any, float, str]]:
    """Parts of the rows with gaps and titles. The last part is the whole.

    DET is fitted to the whole up to its tolerance.
    """

    def stage(part, rows):
      gap = GAP_SHARE * num_params / (2 * len(part))
      title = f'{len(part):,} of {len(self):,} rows from disk'
      return rows, gap if part is not self or model.head != 'det' else 0.0, title

    num_params = sum(int(np.prod(x)) for x in model.param_shapes(self.width).values())
    row_bytes = 4 * self.width + self.values.itemsize * int(np.prod(self.values.shape[1:]))
    row_bytes += 64 * (1 + dict(model.noise).get('num_factors', 0)) * model.is_sampled
    runs = np.arange(-(-len(self) // RUN_ROWS)) * _GOLDEN % 1.0
    for share in SHARES[:-1]:
      places = (np.flatnonzero(runs < share)[:, None] * RUN_ROWS + np.arange(RUN_ROWS)).ravel()
      part = dataclasses.replace(self, order=places[places < len(self)])
      is_held = len(part) * row_bytes <= HELD_BYTES
      yield stage(part, part._read(slice(0, len(part))) if is_held else part)
    yield stage(self, self)


def make_stream(
  model: Model,
  x: Any,
  mean: np.ndarray,
  values: np.ndarray,
  weight: np.ndarray,
  far: inputs.Far,
  c: float,
  c_noise: float,
  mesh: Sequence[int] | None,
) -> Stream:
  """A `Stream` of the rows of arrays [N, ...] that have weight."""
  numbers = None if (weight > 0).all() else np.flatnonzero(weight > 0)
  size = objective.block_rows(model, len(x) if numbers is None else len(numbers), x.shape[1])
  strengths = jnp.float32(1.0 / c), jnp.float32(1.0 / c_noise)
  return Stream(x, values, weight, numbers, mean, far, *strengths, size, mesh)


def sample(
  features: inputs.Features, labels: targets.Targets, weight: np.ndarray, seed: int
) -> tuple[inputs.Features, targets.Targets, np.ndarray]:
  """A random tenth of the rows of positive weight, or as many as `HELD_BYTES` hold."""
  numbers = np.flatnonzero(weight > 0)
  count = min(len(numbers), max(len(numbers) // 10, 1), HELD_BYTES // (4 * features.width))
  numbers = np.sort(np.random.default_rng(seed).choice(numbers, count, replace=False))
  x = np.concatenate([block for _, block in features.some(numbers).blocks()])
  return inputs.Features(x), labels[numbers], weight[numbers]


class _Spilled:
  """Rotations of draws, chunk by chunk."""

  def __init__(self):
    self.file = tempfile.TemporaryFile()
    self.rotation = ()  # of the last chunk
    self.num_bytes = 0  # of a chunk

  def write(self, rotation: tuple[jax.Array, jax.Array]) -> None:
    """Appends those of a chunk, as far as this process has them."""
    self.rotation = rotation
    start = self.file.tell()
    for x in rotation:
      for shard in x.addressable_shards:
        np.asarray(shard.data).tofile(self.file)
    self.num_bytes = self.file.tell() - start

  def of(self, number: int, chunk: objective.Blocks) -> objective.Blocks:
    """The chunk of a number with its draws."""
    self.file.seek(number * self.num_bytes)

    def read(like):
      parts = []
      for shard in like.addressable_shards:
        part = np.fromfile(self.file, np.float32, shard.data.size).reshape(shard.data.shape)
        parts.append(jax.device_put(part, shard.device))
      return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)

    left, right = map(read, self.rotation)
    keys = jnp.broadcast_to(shared_key(jax.random.key(0)), (len(chunk.weight), 1))
    return dataclasses.replace(chunk, draws=Draws(keys, (left, right)))
