"""The output of every command: short lines of this package, warnings. --verbose shows all.

MODEL_DIR/logs always has all lines of a training and the warnings of all libraries.
"""

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Generator
from typing import Any

from absl import flags
from absl import logging as absl_logging

from het_plugin.system import terminal

_ORBAX = os.sep + 'orbax' + os.sep
_LOOP_CLOSED = 'Event loop is closed'  # of asyncio
_PACKAGE = os.sep + 'het_plugin' + os.sep
# Lines of the C++ libraries, such as 'I0000 00:00:1795373126.290662    2334 port.cc:153] ...'.
_NATIVE = re.compile(
  rb'[IWE]\d{4} \d\d:\d\d:\S+ +\d+ \w+\.cc:\d+\]|WARNING: All log messages before'
)


def define_flags() -> None:
  """Defines --verbose for all commands; may be called several times."""
  if 'verbose' not in flags.FLAGS:
    flags.DEFINE_bool('verbose', False, 'Also prints the log messages of libraries.')


def is_verbose() -> bool:
  """Whether --verbose is given."""
  return 'verbose' in flags.FLAGS and bool(flags.FLAGS['verbose'].value)


def set_up() -> None:
  """Directs the log to stderr; call it when the flags are parsed."""
  absl_logging.set_stderrthreshold('info')
  logging.getLogger('het_plugin').setLevel(logging.INFO)
  if not is_verbose():
    handler = absl_logging.get_absl_handler()
    handler.setFormatter(_ShortFormatter())
    handler.addFilter(is_shown)
    sys.unraisablehook = show_unraisable


def show_unraisable(found: Any) -> None:
  """Leaves out arrays whose writing ends when the event loop of their checkpoint is closed.

  If one array cannot be written, on a full disk, orbax waits for no other. Training says it in a
  sentence.
  """
  if not isinstance(found.exc_value, RuntimeError) or str(found.exc_value) != _LOOP_CLOSED:
    sys.__unraisablehook__(found)


def is_shown(record: logging.LogRecord) -> bool:
  """Whether a record is shown without --verbose: one line of this package, or a warning.

  TensorFlow's warnings are left out: their advice on tracing does not apply to data sets that are
  traced once. So are the tracebacks of a write that fails: orbax logs an error that it also raises,
  asyncio logs it for each further array, and training says it in a sentence.
  """
  if record.exc_info and (record.name == 'asyncio' or _ORBAX in record.pathname):
    return False
  if record.levelno >= logging.WARNING:
    return record.name != 'tensorflow' or record.levelno >= logging.ERROR
  return _PACKAGE in record.pathname and '\n' not in record.getMessage()


@contextlib.contextmanager
def only_warnings() -> Generator[None]:
  """Shows only warnings, so that a progress bar stays intact; no effect with --verbose."""
  handler = absl_logging.get_absl_handler()

  def is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or is_verbose()

  handler.addFilter(is_warning)
  try:
    yield
  finally:
    handler.removeFilter(is_warning)


@contextlib.contextmanager
def without_native_lines() -> Generator[None]:
  """Drops the lines that C++ libraries write to file 2 when they are loaded.

  Other lines follow at the end. TensorFlow has no setting for this, because it writes before it
  reads any. Without effect with --verbose and in one of several processes, whose last lines must
  not be lost.
  """
  import jax  # slow: --help and a report of a run need none

  if is_verbose() or 'tensorflow' in sys.modules or jax.distributed.is_initialized():
    yield
    return
  sys.stderr.flush()
  real = os.dup(2)
  with tempfile.TemporaryFile() as kept:
    os.dup2(kept.fileno(), 2)
    try:
      yield
    finally:
      sys.stderr.flush()
      os.dup2(real, 2)
      os.close(real)
      kept.seek(0)
      for line in kept:
        if not _NATIVE.match(line):
          os.write(2, line)


class _ShortFormatter(logging.Formatter):
  """The message, after its level if it is a warning or an error."""

  def format(self, record: logging.LogRecord) -> str:
    text = terminal.printable(super().format(record))
    return text if record.levelno < logging.WARNING else f'{record.levelname.title()}: {text}'
