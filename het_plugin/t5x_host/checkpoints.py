"""Warm starts under t5x as under our trainer: from our checkpoints, t5x's and published files."""

from typing import Any

import flax.core
import jax
from flax import traverse_util
from t5x import utils

from het_plugin.training import checkpoint_reader, checkpoints, warm_start


def find_checkpoint(path: str) -> str:
  """The checkpoint at `path`, which may be a run's directory: then its newest.

  Raises:
    ValueError: there is none.
  """
  return str(checkpoint_reader.find(path))


class CheckpointConfig(utils.CheckpointConfig):
  """t5x's with our `restore`, which `TrainStateInitializer` does.

  Attributes:
    save: t5x's SaveCheckpointConfig; None to save nothing.
    initial: where the initial parameters come from; None for scratch.
  """

  def __init__(
    self,
    save: utils.SaveCheckpointConfig | None = None,
    restore: checkpoints.RestoreCheckpointConfig | None = None,
  ):
    super().__init__(save=save, restore=None)
    self.initial = restore


class TrainStateInitializer(utils.TrainStateInitializer):
  """t5x's, which takes initial parameters from wherever our trainer takes them.

  Optimizer and step start afresh. A run that is resumed has its own checkpoint, which t5x prefers.
  """

  def __init__(self, *args: Any, checkpoint_cfg: CheckpointConfig, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self._initial = checkpoint_cfg.initial

  def from_scratch(self, init_rng: jax.Array) -> Any:
    """The initial state.

    Raises:
      ValueError: as `warm_start.restore_params`.
    """
    state = super().from_scratch(init_rng)
    if self._initial is None:
      return state
    params = flax.core.unfreeze(state.params)
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    read = warm_start.restore_params(self._initial, target)
    flat = traverse_util.flatten_dict(params, sep='/') | read
    return state.replace_params(flax.core.freeze(traverse_util.unflatten_dict(flat, sep='/')))
