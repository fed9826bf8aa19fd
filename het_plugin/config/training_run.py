"""A training that gin has configured."""

import gin
from het_plugin.config import changes
from het_plugin.operations.verdict import Limits


def train_from_gin(
  accept_config_changes: bool = False,
  limits: Limits | None = None,
  began: float | None = None,
) -> tuple[int, object]:
  """Calls the gin-bound `train`, and writes the configuration beside and into its checkpoints.

  Args:
    accept_config_changes: resumes a run although its configuration has another meaning now.
    limits: how long to wait for processes that are dead or stuck; None for the defaults.
    began: `time.monotonic()` when this process began, where it does nothing else; None for now.

  Returns:
    The last step, and the train state.

  Raises:
    ValueError: the configuration has another meaning and that is not accepted, or what `train`
      raises.
  """
  from het_plugin.operations import operations
  from het_plugin.training import train

  config = changes.RunConfig(gin.config_str(), accept_config_changes)
  return gin.get_configurable(train.train)(
    config=config, observer=operations.Operations(limits, began)
  )
