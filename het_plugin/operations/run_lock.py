"""One training at a time in a run's directory.

The lock is the file `lock` in it, which says who holds it. On file systems that know locks (local
ones and most NFS) the kernel holds it, and lets go when the process ends, however it ends.
Elsewhere (gs://) the holder writes the file anew every few seconds: one that no longer changes is
nobody's.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from het_plugin.training import exit_codes, processes, run_files

_log = logging.getLogger(__name__)

NAME = 'lock'
BEAT_SECONDS = 5.0
# How long one that comes waits: a run that was told to stop may still be saving, and a holder that
# misses three beats is gone.
PATIENCE_SECONDS = 3 * BEAT_SECONDS
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_POLL_SECONDS = 0.2

_Release = Callable[[], None]


@contextlib.contextmanager
def locked(
  model_dir: epath.PathLike,
  patience_seconds: float = PATIENCE_SECONDS,
  beat_seconds: float = BEAT_SECONDS,
) -> Iterator[None]:
  """Holds the lock of a run's directory, which is created when missing; all processes call it, and
  process 0 holds it.

  Args:
    model_dir: the directory.
    patience_seconds: how long to wait for who holds it, and, without locks of the file system, how
      long the file must not have changed to be taken over.
    beat_seconds: between two writes of the file, without locks of the file system.

  Raises:
    ValueError: in all processes: another training holds it, or the directory cannot be written.
  """
  release = []
  processes.in_the_first(
    lambda: release.append(_acquire(epath.Path(model_dir), patience_seconds, beat_seconds))
  )
  try:
    yield
  finally:
    for let_go in release:
      let_go()


def _acquire(model_dir: epath.Path, patience: float, beat: float) -> _Release:
  try:
    model_dir.mkdir(parents=True, exist_ok=True)
    if not run_files.is_remote(model_dir):
      try:
        return _take(model_dir / NAME, patience)
      except OSError as error:
        if error.errno not in _NO_LOCKS:
          raise
    return _claim(model_dir / NAME, patience, beat)
  except OSError as error:
    raise ValueError(
      f'model_dir={model_dir} cannot be written: {error.strerror or error}'
    ) from error


def _holder(**more: Any) -> dict[str, Any]:
  since = datetime.datetime.now(datetime.UTC).isoformat(' ', 'seconds')
  return {'host': socket.gethostname(), 'pid': os.getpid(), 'since': since, **more}


def _read(path: epath.Path) -> dict[str, Any] | None:
  """What the holder wrote; empty while it writes, None where there is no file."""
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    return None
  except json.JSONDecodeError:
    return {}


def _who(holder: dict[str, Any] | None) -> str:
  return 'process {pid} on {host}, since {since}'.format(**holder) if holder else 'another process'


def _in_use(path: epath.Path) -> ValueError:
  return ValueError(
    f'model_dir={path.parent} is in use: {_who(_read(path))}, trains in it; stop that one, or take '
    'another model_dir'
  )


def _say_that_it_waits(path: epath.Path, patience: float) -> None:
  _log.warning('%s is held by %s: waiting %.0f s for its end.', path, _who(_read(path)), patience)


# Locks of the file system.

_descriptors: set[int] = set()


def _close_in_child() -> None:
  # A data worker that was forked has the lock too, and may outlive its parent.
  while _descriptors:
    os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_in_child)


def _take(path: epath.Path, patience: float) -> _Release:
  deadline, waiting = time.monotonic() + patience, False
  while True:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      if _is_at(path, descriptor):
        break
      os.close(descriptor)  # its holder removed it between the two calls
      continue
    except OSError as error:
      os.close(descriptor)
      if not isinstance(error, BlockingIOError):
        raise
    if time.monotonic() >= deadline:
      raise _in_use(path)
    if not waiting:
      _say_that_it_waits(path, patience)
      waiting = True
    time.sleep(_POLL_SECONDS)
  text = json.dumps(_holder()).encode()
  os.pwrite(descriptor, text, 0)
  os.ftruncate(descriptor, len(text))
  _descriptors.add(descriptor)

  def release() -> None:
    path.unlink(missing_ok=True)  # before others can lock it
    _descriptors.discard(descriptor)
    os.close(descriptor)

  return release


def _is_at(path: epath.Path, descriptor: int) -> bool:
  try:
    return os.path.samestat(os.stat(path), os.fstat(descriptor))
  except FileNotFoundError:
    return False


# A file that is fresh.


def _claim(path: epath.Path, patience: float, beat: float) -> _Release:
  seen = _read(path)
  if seen is not None:
    _say_that_it_waits(path, patience)
    deadline, alive = time.monotonic() + patience, False
    while seen is not None and time.monotonic() < deadline:
      time.sleep(min(beat, patience) / 4)
      now = _read(path)
      alive |= now != seen
      seen = now
    if seen is not None and alive:
      raise _in_use(path)
  holder = _holder(run=uuid.uuid4().hex)
  path.write_text(json.dumps({**holder, 'beat': 0}))
  time.sleep(beat / 2)
  if not _is_ours(_read(path), holder):  # of two that come at once, the later writer has it
    raise _in_use(path)
  ended = threading.Event()
  thread = threading.Thread(target=_beat, args=(path, holder, beat, ended), daemon=True)
  thread.start()

  def release() -> None:
    ended.set()
    thread.join()
    if _is_ours(_read(path), holder):
      path.unlink(missing_ok=True)

  return release


def _is_ours(found: dict[str, Any] | None, holder: dict[str, Any]) -> bool:
  return bool(found) and found['run'] == holder['run']


def _beat(path: epath.Path, holder: dict[str, Any], beat: float, ended: threading.Event) -> None:
  number = 0
  while not ended.wait(beat):
    number += 1
    try:
      now = _read(path)
      if now and not _is_ours(now, holder):
        _give_up(path)
      path.write_text(json.dumps({**holder, 'beat': number}))
    except Exception as error:  # whatever the file system has; the next beat may pass
      _log.warning('%s cannot be written: %s', path, error)


def _give_up(path: epath.Path) -> None:
  # This process stood still for so long that another took the directory. To save now would be to
  # write into its run.
  print(f'Error: {_in_use(path)}', file=sys.stderr, flush=True)
  os._exit(exit_codes.FAILED)
