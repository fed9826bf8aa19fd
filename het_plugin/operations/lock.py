"""One training at a time in a run's directory.

On file systems that have locks (local ones and most NFS) the kernel locks the file `lock`, which
says who holds it, and lets go when the process ends, however it ends. Elsewhere (gs://) the facts
of the newest attempt tell: a process 0 that runs renews them every few seconds.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator

from etils import epath

from het_plugin.operations import facts
from het_plugin.training import processes, run_files

_log = logging.getLogger(__name__)

NAME = 'lock'
# How long a new training waits: one that was told to stop may still be saving, and one that misses
# three beats is gone.
PATIENCE_SECONDS = 15.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_POLL_SECONDS = 0.2

_descriptors: set[int] = set()


def _close_in_child() -> None:
  # A forked data worker has the lock too, and may outlive its parent.
  while _descriptors:
    os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def held(model_dir: epath.PathLike, patience_seconds: float | None = None) -> Iterator[epath.Path]:
  """Holds a run's directory, which is created when missing, and begins an attempt in it. All
  processes call it, and process 0 holds it.

  Args:
    model_dir: the directory.
    patience_seconds: how long to wait for a training that is in it; None for PATIENCE_SECONDS.

  Yields:
    The folder of the new attempt, the same in all processes.

  Raises:
    ValueError: in all processes: another training holds it.
    OSError: the directory cannot be written; ValueError where there are several processes.
  """
  model_dir = epath.Path(model_dir)
  patience = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
  with contextlib.ExitStack() as releases:

    def acquire() -> str:
      model_dir.mkdir(parents=True, exist_ok=True)
      if release := _lock(model_dir, patience):
        releases.callback(release)
      else:
        _wait_for_silence(model_dir, patience)
      return facts.new_attempt(model_dir).name

    yield model_dir / facts.FOLDER / processes.in_the_first(acquire)


def _in_use(model_dir: epath.Path, holder: str) -> ValueError:
  return ValueError(
    f'model_dir={model_dir} is in use: {holder}, trains in it; stop that one, or take another '
    'model_dir'
  )


def _say_that_it_waits(model_dir: epath.Path, holder: str, patience: float) -> None:
  _log.warning('%s is held by %s: waiting %.0f s for its end.', model_dir, holder, patience)


def _lock(model_dir: epath.Path, patience: float) -> Callable[[], None] | None:
  """Locks the file; returns what releases it, or None where the file system has no locks."""
  if run_files.is_remote(model_dir):
    return None
  path = model_dir / NAME
  deadline, waiting = time.monotonic() + patience, False
  try:
    while (descriptor := _try_lock(path)) is None:
      if time.monotonic() >= deadline:
        raise _in_use(model_dir, _holder(path))
      if not waiting:
        _say_that_it_waits(model_dir, _holder(path), patience)
        waiting = True
      time.sleep(_POLL_SECONDS)
  except OSError as error:
    if error.errno in _NO_LOCKS:
      return None
    raise
  since = datetime.datetime.now(datetime.UTC).isoformat(' ', 'seconds')
  text = json.dumps({'host': socket.gethostname(), 'pid': os.getpid(), 'since': since}).encode()
  os.pwrite(descriptor, text, 0)
  os.ftruncate(descriptor, len(text))
  _descriptors.add(descriptor)

  def release() -> None:
    path.unlink(missing_ok=True)  # before others can lock it
    _descriptors.discard(descriptor)
    os.close(descriptor)

  return release


def _try_lock(path: epath.Path) -> int | None:
  """The descriptor of the locked file; None if another process holds it."""
  descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor)):
      return descriptor
  except (BlockingIOError, FileNotFoundError):
    pass
  except OSError:
    os.close(descriptor)
    raise
  # Held, or its holder removed the file between two of these calls.
  os.close(descriptor)
  return None


def _holder(path: epath.Path) -> str:
  found = run_files.read_json(path) or {}
  return 'process {pid} on {host}, since {since}'.format(**found) if found else 'another process'


def _wait_for_silence(model_dir: epath.Path, patience: float) -> None:
  """Without locks: a process 0 that goes on to beat is there."""
  folders = list(facts.attempts(model_dir).values())
  first = facts.read(facts.file(folders[-1], 0)) if folders else None
  if first is None or first.state != facts.RUNNING:
    return
  _say_that_it_waits(model_dir, first.name, patience)
  deadline, now = time.monotonic() + patience, first
  while time.monotonic() < deadline:
    time.sleep(min(_POLL_SECONDS * 5, patience / 4))
    now = facts.read(facts.file(folders[-1], 0)) or now
    if now.state != facts.RUNNING:
      return
  if now.beat != first.beat:
    raise _in_use(model_dir, first.name)
