"""One training at a time in a run's directory.

The kernel locks the file `lock` and releases it when the process ends, however it ends. In an
object store (gs://), which has no locks, the facts of the newest attempt are watched: while it
runs, its process 0 renews them.
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
from collections.abc import Iterator
from typing import IO

from etils import epath

from het_plugin.operations import attempts
from het_plugin.system import processes, run_files

_log = logging.getLogger(__name__)

NAME = 'lock'
# How long a new training waits. The other one may still be saving; if it misses three beats it is
# gone.
PATIENCE_SECONDS = 15.0
_POLL_SECONDS = 0.2


@contextlib.contextmanager
def held(model_dir: epath.PathLike, patience: float = PATIENCE_SECONDS) -> Iterator[epath.Path]:
  """Locks a run's directory, which is created if it is missing, and begins an attempt in it.

  All processes call this, and process 0 holds the lock. It waits `patience` seconds for another
  training in the directory.

  Yields:
    The folder of the new attempt, the same on all processes.

  Raises:
    ValueError: another training holds the directory; raised on all processes.
    OSError: the directory cannot be written; a ValueError if there are several processes.
  """
  model_dir = epath.Path(model_dir)
  with contextlib.ExitStack() as stack:

    def acquire() -> str:
      model_dir.mkdir(parents=True, exist_ok=True)
      if run_files.is_remote(model_dir):
        _wait_for_silence(model_dir, patience)
      else:
        _lock(stack.enter_context(run_files.open_lock(model_dir / NAME)), model_dir, patience)
      return attempts.new_folder(model_dir).name

    yield model_dir / attempts.FOLDER / processes.in_the_first(acquire)


def taken(file: IO[str]) -> bool | None:
  """Locks an open file, and says whether this process has it; None if there are no locks."""
  try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not shared with forks
  except OSError as error:
    return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
  return True


def _lock(file, model_dir: epath.Path, patience: float) -> None:
  deadline = time.monotonic() + patience
  waiting = False
  while not (has_lock := taken(file)):
    if has_lock is None:
      return _wait_for_silence(model_dir, patience)
    holder = 'process {pid} on {host}, since {since}'.format(
      **({'pid': '?', 'host': '?', 'since': '?'} | (run_files.read_json(model_dir / NAME) or {}))
    )
    if time.monotonic() >= deadline:
      raise _in_use(model_dir, holder)
    if not waiting:
      _say_that_it_waits(model_dir, holder, patience)
      waiting = True
    time.sleep(_POLL_SECONDS)
  since = datetime.datetime.now(datetime.UTC).isoformat(' ', 'seconds')
  file.truncate(0)
  json.dump({'host': socket.gethostname(), 'pid': os.getpid(), 'since': since}, file)
  file.flush()


def _wait_for_silence(model_dir: epath.Path, patience: float) -> None:
  """Without locks: waits until the facts of process 0 stop changing."""
  folders = list(attempts.folders(model_dir).values())
  first = attempts.read(attempts.file(folders[-1], 0)) if folders else None
  if first is None or first.state != attempts.RUNNING:
    return
  _say_that_it_waits(model_dir, first.name, patience)
  deadline = time.monotonic() + patience
  now = first
  while time.monotonic() < deadline:
    time.sleep(min(_POLL_SECONDS * 5, patience / 4))
    now = attempts.read(attempts.file(folders[-1], 0)) or now
    if now.state != attempts.RUNNING:
      return
  if now.beat != first.beat:
    raise _in_use(model_dir, first.name)


def _in_use(model_dir: epath.Path, holder: str) -> ValueError:
  return ValueError(
    f'model_dir={model_dir} is in use by {holder}: stop that training, or take another model_dir'
  )


def _say_that_it_waits(model_dir: epath.Path, holder: str, patience: float) -> None:
  _log.warning('%s is held by %s: waiting %.0f s for its end.', model_dir, holder, patience)
