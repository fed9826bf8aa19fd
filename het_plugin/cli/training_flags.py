"""Flags of training, which launchers also take and pass on."""

import dataclasses

from absl import flags

from het_plugin.cli.settings import Processes
from het_plugin.system import screen
from het_plugin.system.ranges import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Processes):
  """Settings of training beside gin's.

  Attributes:
    stall_timeout_seconds: How long training may make no progress before its processes end: more
      than the longest compilation, restore or action takes.
    accept_config_changes: Resumes a run although its configuration may now give other results; the
      old one is kept.
  """

  stall_timeout_seconds: Count = 1800
  accept_config_changes: bool = False


def given_flags() -> list[str]:
  """The flags of training on the command line, as arguments of training.

  They include those of JAX and of the log, without gin's (`sweep.make_jobs` has these).
  """
  ours = {field.name for field in dataclasses.fields(Training)} | {'allow_imports'}
  modules = 'jax', 'absl.logging', screen.__name__
  return [
    flag.serialize()
    for module, defined in sorted(flags.FLAGS.flags_by_module_dict().items())
    for flag in defined
    if flag.present
    and (flag.name in ours or module in modules or module.partition('.')[0] == 'jax')
  ]
