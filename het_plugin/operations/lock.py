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
import sys
import time
import uuid
from collections.abc import Callable, Iterator

from etils import epath

from het_plugin.operations import facts
from het_plugin.training import exit_codes, processes, run_files

_log = logging.getLogger(__name__)

NAME = 'lock'
# How long a new training waits: one that was told to stop may still be saving, and one that misses
# three beats is gone.
PATIENCE_SECONDS = 15.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_POLL_SECONDS = 0.2
_CLAIM_SECONDS = 2.5

_descriptors: set[int] = set()


def _close_in_child() -> None:
  # A forked data worker has the lock too, and may outlive its parent.
  while _descriptors:
    os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_in_child)


class Lock:
  """What process 0 has found out while it took the directory.

  Attributes:
    by_kernel: whether the kernel keeps others out. If not, `check` is to be called at each beat.
  """

  by_kernel = True

  def check(self, attempt: epath.Path) -> None:
    """Ends this process if it stood still for so long that another took the directory: a checkpoint
    saved now would be written into the other's run.
    """
    if self.by_kernel:
      return
    model_dir = attempt.parent.parent
    *_, newest = facts.attempts(model_dir).values()
    if newest != attempt:
      now = facts.read(facts.file(newest, 0))
      holder = 'another process' if now is None else now.name
      print(f'Error: {_in_use(model_dir, holder)}', file=sys.stderr, flush=True)
      os._exit(exit_codes.FAILED)


@contextlib.contextmanager
def held(
  model_dir: epath.PathLike, patience_seconds: float | None = None
) -> Iterator[tuple[Lock, epath.Path]]:
  """Holds a run's directory, which is created when missing, and begins an attempt in it. All
  processes call it, and process 0 holds it.

  Args:
    model_dir: the directory.
    patience_seconds: how long to wait for a training that is in it; None for PATIENCE_SECONDS.

  Yields:
    The lock, and the folder of the new attempt, the same in all processes.

  Raises:
    ValueError: in all processes: another training holds it, or the directory cannot be written.
  """
  model_dir = epath.Path(model_dir)
  patience = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
  lock, releases = Lock(), []
  name = processes.in_the_first(lambda: _acquire(model_dir, patience, lock, releases))
  try:
    yield lock, model_dir / facts.FOLDER / name
  finally:
    for release in releases:
      release()


def _acquire(
  model_dir: epath.Path, patience: float, lock: Lock, releases: list[Callable[[], None]]
) -> str:
  """Returns the name of the attempt's folder."""
  try:
    model_dir.mkdir(parents=True, exist_ok=True)
    if not run_files.is_remote(model_dir):
      try:
        releases.append(_take(model_dir / NAME, patience))
      except OSError as error:
        if error.errno not in _NO_LOCKS:
          raise
    lock.by_kernel = bool(releases)
    if lock.by_kernel:
      return facts.new_attempt(model_dir).name
    _wait_for_silence(model_dir, patience)
    return _claim(model_dir)
  except OSError as error:
    for release in releases:
      release()
    raise ValueError(
      f'model_dir={model_dir} cannot be written: {error.strerror or error}'
    ) from error


def _in_use(model_dir: epath.Path, holder: str) -> ValueError:
  return ValueError(
    f'model_dir={model_dir} is in use: {holder}, trains in it; stop that one, or take another '
    'model_dir'
  )


def _say_that_it_waits(model_dir: epath.Path, holder: str, patience: float) -> None:
  _log.warning('%s is held by %s: waiting %.0f s for its end.', model_dir, holder, patience)


# With locks of the file system.


def _take(path: epath.Path, patience: float) -> Callable[[], None]:
  """Returns what releases the lock."""
  deadline, waiting = time.monotonic() + patience, False
  while (descriptor := _try_lock(path)) is None:
    if time.monotonic() >= deadline:
      raise _in_use(path.parent, _holder(path))
    if not waiting:
      _say_that_it_waits(path.parent, _holder(path), patience)
      waiting = True
    time.sleep(_POLL_SECONDS)
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


# Without.


def _wait_for_silence(model_dir: epath.Path, patience: float) -> None:
  folders = list(facts.attempts(model_dir).values())
  first = facts.read(facts.file(folders[-1], 0)) if folders else None
  if first is None or first.state != facts.RUNNING:
    return
  _say_that_it_waits(model_dir, first.name, patience)
  deadline, beat = time.monotonic() + patience, first.beat
  while time.monotonic() < deadline:
    time.sleep(min(_POLL_SECONDS * 5, patience / 4))
    now = facts.read(facts.file(folders[-1], 0))
    if now is not None and now.state != facts.RUNNING:
      return
    beat = beat if now is None else now.beat
  if beat != first.beat:
    raise _in_use(model_dir, first.name)


def _claim(model_dir: epath.Path) -> str:
  """Begins an attempt; of two processes that begin the same one, the later writer has it."""
  attempt = facts.new_attempt(model_dir)
  token = uuid.uuid4().hex
  (attempt / 'claim').write_text(token)
  time.sleep(_CLAIM_SECONDS)
  if (attempt / 'claim').read_text() != token:
    raise _in_use(model_dir, 'another process')
  return attempt.name
