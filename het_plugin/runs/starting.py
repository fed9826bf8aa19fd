"""Runs the training that gin configures."""

import gin
from het_plugin.config import changes
from het_plugin.training import observer as observer_lib


def train_from_gin(
  accept_config_changes: bool = False,
  observer: observer_lib.Observer | None = None,
  how_to_accept: str | None = '--accept_config_changes',
  **settings: object,
) -> tuple[int, object]:
  """Calls the gin-bound `train`, and keeps the configuration beside and in its checkpoints.

  `settings` replace bound arguments, and the `observer` is by default an `Operations`. The error of
  a change names `how_to_accept` it; None where a command has no such flag.

  Returns:
    The last step, and the train state.

  Raises:
    ValueError: the results may change and this is not accepted, or `train` raises it.
  """
  from het_plugin.operations import operations
  from het_plugin.training import train

  if 'model' not in gin.get_bindings(train.train, resolve_references=False):
    raise ValueError('train.model is not set: include het_plugin/gin/runs/train.gin')
  config = changes.RunConfig(gin.config_str(), accept_config_changes, how_to_accept)
  return gin.get_configurable(train.train)(
    config=config, observer=observer or operations.Operations(), **settings
  )
