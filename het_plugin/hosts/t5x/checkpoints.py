"""Warm starts under t5x: from our checkpoints, t5x's and published files, as in our trainer."""

from collections.abc import Callable
from typing import Any

import flax.core
import jax
from flax import traverse_util
from t5x import utils

from het_plugin.training import checkpoint_reader, checkpoints, warm_start


def find_checkpoint(path: str) -> str:
  """The checkpoint at `path`, or the newest one of the run at `path`; ValueError without one."""
  return str(checkpoint_reader.find(path))


class CheckpointConfig(utils.CheckpointConfig):
  """t5x's CheckpointConfig with our `restore`, which `TrainStateInitializer` carries out.

  Attributes:
    save: t5x's SaveCheckpointConfig; None to save nothing.
    initial: source of the initial parameters; None to initialise all.
  """

  def __init__(
    self,
    save: utils.SaveCheckpointConfig | None = None,
    restore: checkpoints.RestoreCheckpointConfig | None = None,
  ):
    super().__init__(save=save, restore=None)
    self.initial = restore


class TrainStateInitializer(utils.TrainStateInitializer):
  """t5x's TrainStateInitializer, which takes initial parameters from the sources of our trainer.

  Optimizer and step start afresh. A resumed run has its own checkpoint, which t5x prefers.
  """

  def __init__(
    self, *args: Any, init_fn: Callable, checkpoint_cfg: CheckpointConfig, **kwargs: Any
  ):
    super().__init__(*args, init_fn=init_fn, **kwargs)
    self._initial = checkpoint_cfg.initial
    self._model = init_fn.__self__  # t5x finds the model so, too

  def from_scratch(self, init_rng: jax.Array) -> Any:
    """The initial state; raises the errors of `warm_start.restore_params`."""
    state = super().from_scratch(init_rng)
    if self._initial is None:
      return state
    params = flax.core.unfreeze(state.params)
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    read = warm_start.restore_params(self._initial, target, model=self._model)
    flat = traverse_util.flatten_dict(params, sep='/') | read
    return state.replace_params(flax.core.freeze(traverse_util.unflatten_dict(flat, sep='/')))
