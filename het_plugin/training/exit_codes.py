"""The exit codes of a run and which one an exception means; docs/launch.md says what launchers make
of them.
"""

import re
import signal

import jax

FAILED = 1
WRONG_SETTING = 2
# The others are lost, or nothing moves. The code of SIGABRT, by which JAX ends such a process.
LOST = 128 + signal.SIGABRT

# What wrong settings raise: one line says it all.
SETTING_ERRORS = (ValueError, OSError, SyntaxError, ImportError)

# What XLA calls the end of a connection depends on who made it: gloo, NCCL, a TPU, a barrier. On
# CPU it even raises it as a ValueError.
_CONNECTION = re.compile(
  r'(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): '
)


def is_lost_connection(error: BaseException) -> bool:
  """Whether one of several processes would raise this when another one has gone."""
  return (
    isinstance(error, (ValueError, RuntimeError))
    and jax.distributed.is_initialized()
    and _CONNECTION.match(str(error)) is not None
  )


def of(error: BaseException | None) -> int:
  """The exit code of a main from which this escapes; None for none."""
  if error is None:
    return 0
  if isinstance(error, SystemExit):
    return error.code if isinstance(error.code, int) else int(error.code is not None)
  if is_lost_connection(error):
    return LOST
  return WRONG_SETTING if isinstance(error, SETTING_ERRORS) else FAILED
