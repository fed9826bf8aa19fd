"""Exit codes of a run, and the code for an exception; see docs/launch.md for what launchers do."""

import re
import signal
import sys

FAILED = 1
WRONG_SETTING = 2
# Stopped on request, with a checkpoint on disk: a launcher starts the run again.
PREEMPTED = 42
# Other processes are lost or the run hangs: the code of SIGABRT, with which JAX ends a process.
LOST = 128 + signal.SIGABRT

# Exceptions of wrong settings, which are reported in one line.
SETTING_ERRORS = (ValueError, OSError, SyntaxError, ImportError)

# XLA reports a lost connection differently for gloo, NCCL, TPUs and barriers. On CPU it even raises
# a ValueError.
_CONNECTION = re.compile(
  r'(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): '
)


class Preempted(SystemExit):  # noqa: N818 (it is an exit, not an error)
  """Raised once the checkpoint of a preempted run, of `step`, is on disk; the exit code is 42."""

  def __init__(self, step: int):
    super().__init__(PREEMPTED)
    self.step = step


def is_distributed() -> bool:
  """Whether this process has joined others. It has not where nothing has imported JAX."""
  jax = sys.modules.get('jax')
  return jax is not None and hasattr(jax, 'distributed') and jax.distributed.is_initialized()


def is_lost_connection(error: BaseException) -> bool:
  """Whether a process raises this error because another process has gone."""
  return (
    isinstance(error, (ValueError, RuntimeError))
    and is_distributed()
    and _CONNECTION.match(str(error)) is not None
  )


def of(error: BaseException | None) -> int:
  """The exit code of a command that ends with this exception, or with None."""
  if error is None:
    return 0
  if isinstance(error, SystemExit):
    return error.code if isinstance(error.code, int) else int(error.code is not None)
  if is_lost_connection(error):
    return LOST
  return WRONG_SETTING if isinstance(error, SETTING_ERRORS) else FAILED
