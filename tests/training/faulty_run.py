"""A process of a run with two. The second cannot read what the first can, and cannot write.

Before the run they do what `late_run` does.
"""

import errno
import os
import sys
import threading
from pathlib import Path

import jax

from het_plugin.system import distributed
from het_plugin.training import checkpoints
from tests.training import late_run, toy_run


class FullDisk:
  """A part of a write in the background, as orbax waits for it."""

  met = threading.Event()  # by the thread that writes

  def result(self, timeout=None):
    self.met.set()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_disk(patch) -> None:
  """From now on what is saved fails in the background; patch(object, name, value) sets it."""
  FullDisk.met.clear()
  handler = checkpoints.ocp.PyTreeCheckpointHandler
  async_save = handler.async_save

  async def fail(self, *args, **kwargs):
    return [*await async_save(self, *args, **kwargs), FullDisk()]

  patch(handler, 'async_save', fail)


def lose(patch, name: str) -> None:
  """The arrays of the checkpoint of this name cannot be read from now on."""
  handler = checkpoints.ocp.PyTreeCheckpointHandler
  restore = handler.restore

  def fail(self, directory, *args, **kwargs):
    if directory.parent.name == name:
      raise OSError(errno.EIO, os.strerror(errno.EIO))
    return restore(self, directory, *args, **kwargs)

  patch(handler, 'restore', fail)


def main(model_dir: str, address: str, process: str) -> None:
  jax.distributed.initialize(
    address, num_processes=2, process_id=int(process), heartbeat_timeout_seconds=10
  )
  late_run.main(Path(model_dir))
  if process == '1':
    fill_disk(setattr)
    lose(setattr, 'checkpoint_8')
  with distributed.leaving():  # as the mains do
    toy_run.run(Path(model_dir))


if __name__ == '__main__':
  main(*sys.argv[1:])
