"""Flags of training beside those of gin. Launchers that write its command line take them too, and
hand them on.
"""

from absl import flags

from het_plugin.config import distributed
from het_plugin.operations.verdict import Limits


def define_flags() -> None:
  distributed.define_flags()
  flags.DEFINE_integer(
    'stall_timeout_seconds',
    int(Limits.stall_timeout_seconds),
    'How long training may get no further before its processes end: more than the longest compile, '
    'restore or action takes.',
    lower_bound=1,
  )
  flags.DEFINE_bool(
    'accept_config_changes',
    False,
    'Resumes a run whose configuration now means something else; the old one is kept.',
  )


def given() -> list[str]:
  """Those on the command line, as arguments of training."""
  defined = flags.FLAGS.flags_by_module_dict()
  return [
    flag.serialize() for name in (distributed.__name__, __name__) for flag in defined[name]
    if flag.present
  ]  # fmt: skip
