"""Flags of training, which launchers also take and pass on."""

from absl import flags

from het_plugin.system import distributed, screen


def define_flags() -> None:
  """The flags of training, and those of a run of several processes."""
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
  ours = distributed.__name__, __name__, screen.__name__, 'absl.logging'
  return [
    flag.serialize()
    for module, defined in sorted(flags.FLAGS.flags_by_module_dict().items())
    for flag in defined
    if flag.present
    and (module in ours or module.partition('.')[0] == 'jax' or flag.name == 'allow_imports')
  ]
