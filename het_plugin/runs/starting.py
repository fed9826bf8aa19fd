"""Runs the training that gin configures, and defines its flags."""

from absl import flags

import gin
from het_plugin.config import changes, distributed, foreign, screen
from het_plugin.training import observer as observer_lib


def define_flags() -> None:
  """Flags of training, which launchers also take and pass on (`given_flags`)."""
  distributed.define_flags()
  flags.DEFINE_integer(
    'stall_timeout_seconds',
    1800,
    'How long training may make no progress before its processes end: more than the longest '
    'compilation, restore or action takes.',
    lower_bound=1,
  )
  flags.DEFINE_bool(
    'accept_config_changes',
    False,
    'Resumes a run although its configuration may now give other results; the old one is kept.',
  )


def given_flags() -> list[str]:
  """The flags of training on the command line, as arguments of training.

  They include those of JAX and of the log, without gin's (`sweep.make_jobs` has these).
  """
  ours = distributed.__name__, __name__, foreign.__name__, screen.__name__, 'absl.logging'
  return [
    flag.serialize()
    for module, defined in sorted(flags.FLAGS.flags_by_module_dict().items())
    if module in ours or module.partition('.')[0] == 'jax'
    for flag in defined
    if flag.present
  ]


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
