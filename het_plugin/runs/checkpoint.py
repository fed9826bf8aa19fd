"""What is known of a checkpoint, read once where its path is met.

A path is a run's directory (its newest checkpoint), one checkpoint in it
(runs/het_xl/checkpoint_400) or a published file (.npz, .safetensors). The directory may be one of
t5x.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from het_plugin import weights
from het_plugin.config import changes
from het_plugin.training import checkpoint_reader, class_names, warm_start

Shapes = Mapping[str, tuple[int, ...]]

_CHANNELS = (3, 1)  # the usual ones first


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
  """A checkpoint of a run, or a published file.

  Attributes:
    path: the checkpoint's directory, or the published file.
    step: the step in the name of the directory; None for a published file.
    record: what the training kept of itself; empty for a published file, and in t5x.
    arrays: the content of a published file; None for a checkpoint, whose arrays are read on demand.
  """

  path: str
  step: int | None = None
  record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  arrays: Mapping[str, np.ndarray] | None = None

  @classmethod
  def find(cls, path: epath.PathLike) -> 'Checkpoint':
    """Finds a checkpoint, and reads its record.

    Raises:
      ValueError: there is none, or a published file cannot be read.
    """
    if weights.is_weights_file(path):
      return cls(str(path), arrays=weights.read_arrays(path))
    found = checkpoint_reader.find(path)
    step = checkpoint_reader.step_of(found)
    return cls(str(found), step, checkpoint_reader.intact_record(found))

  def check_trained(self, flag: str = '--checkpoint', hint: str = 'give that of a run') -> None:
    """Raises ValueError for a published file; the error names the flag, and a hint."""
    if self.step is None:
      raise ValueError(f'{flag}={self.path} is a published file, whose head is not trained: {hint}')

  @functools.cached_property
  def config(self) -> epath.Path | None:
    """The file with the configuration that it was trained with, which may be missing; None for a
    published file.
    """
    return None if self.step is None else changes.config_file(epath.Path(self.path), self.step)

  @functools.cached_property
  def class_names(self) -> tuple[str, ...] | None:
    """The names of the classes that it was trained on; None where they were not kept.

    Raises:
      ValueError: they are not those of the record.
    """
    if self.step is None:
      return None
    return class_names.beside(epath.Path(self.path), self.record.get('class_names'))

  def channels(self, shapes_of: Callable[[int], Shapes]) -> int:
    """The channels of the images: those of the record, else those that the parameters tell.

    `shapes_of` gives the shapes of the model's parameters by name for a number of channels.
    """
    if image := self.record.get('image'):  # [side, side, channels]
      return image[-1]
    usual, *others = _CHANNELS
    sizes = _sizes(weights.unstacked(shapes_of(usual)))
    if self.arrays is None:
      saved = _sizes(weights.unstacked(checkpoint_reader.params_shapes(self.path)))
    else:
      try:
        saved = weights.saved_sizes(self.arrays, shapes_of(usual), weights.read_config(self.path))
      except ValueError as error:
        raise ValueError(f'{self.path}: {error}') from error
    pairs = [(saved[name], size) for name, size in sizes.items() if name in saved]
    others += [usual * a // b for a, b in pairs if a != b and usual * a % b == 0]
    if all(a == b for a, b in pairs):
      return usual

    def num_wrong(channels: int) -> int:
      found = _sizes(weights.unstacked(shapes_of(channels)))
      return sum(saved.get(name, size) != size for name, size in found.items())

    return min((usual, *sorted(set(others))), key=num_wrong)

  def read_params(self, ema: bool) -> dict[str, np.ndarray]:
    """{name: float32 array} on the host, of a checkpoint; with `ema` of the average."""
    return checkpoint_reader.read_params(self.path, ema)

  def params_to(
    self, target: Mapping[str, jax.ShapeDtypeStruct], model: Any, ema: bool
  ) -> dict[str, jax.Array]:
    """The parameters with the shapes and shardings of the target; collective.

    Those of a published file lack what it does not have, and the head, whose classes are others.

    Raises:
      ValueError: they do not fit the target.
    """
    if self.arrays is not None:
      try:
        return warm_start.from_published(self.path, self.arrays, target, model, weights.INIT)
      except ValueError as error:
        raise ValueError(f'{self.path}: {error}') from error
    saved = checkpoint_reader.params_shapes(self.path, ema)
    checkpoint_reader.check_match(self.path, {name: x.shape for name, x in target.items()}, saved)
    return checkpoint_reader.read_params_to(epath.Path(self.path), target, ema)


def _sizes(shapes: Shapes) -> dict[str, int]:
  return {name: math.prod(shape) for name, shape in shapes.items()}
