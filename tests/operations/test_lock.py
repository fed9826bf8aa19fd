"""Locks on run directories, also where the file system has none, and holders that die."""

import errno
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from het_plugin.operations import attempts, lock

ROOT = Path(__file__).parents[2]


def held(folder, patience=0.0):
  return lock.held(folder, patience)


def refused(folder, **settings):
  with pytest.raises(ValueError) as error, held(folder, **settings):
    pytest.fail('it was free')
  return str(error.value)


HOLDER = """
import os, sys, time
from het_plugin.operations import lock
with lock.held(sys.argv[1]):
  worker = os.fork()
  if worker:
    print(worker, flush=True)
  time.sleep(60)
"""


def test_a_holder_is_named_waited_for_and_one_that_was_killed_holds_nothing(tmp_path):
  """Not even by a data worker that it forked and that outlives it."""
  command = [sys.executable, '-W', 'ignore', '-c', HOLDER, tmp_path]
  holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  worker = None
  try:
    worker = int(holder.stdout.readline())
    message = refused(tmp_path)
    assert f'model_dir={tmp_path} ' in message
    assert f'process {holder.pid} on {socket.gethostname()}, since 2' in message
    assert {path.name for path in tmp_path.iterdir()} == {lock.NAME, 'attempts'}
    threading.Timer(0.5, holder.kill).start()
    with held(tmp_path, patience=300) as attempt:
      assert holder.wait() == -signal.SIGKILL
      os.kill(worker, 0)
      assert attempt == tmp_path / 'attempts' / 'attempt_0002'
      assert json.loads((tmp_path / lock.NAME).read_text())['pid'] == os.getpid()
  finally:
    holder.kill()
    if worker is not None:
      os.kill(worker, signal.SIGKILL)


def test_a_link_is_no_lock(tmp_path):
  other = tmp_path / 'other'
  other.write_text('mine')
  (tmp_path / lock.NAME).symlink_to(other)
  with pytest.raises(OSError, match=lock.NAME), held(tmp_path):
    pytest.fail('it was locked')
  assert other.read_text() == 'mine'


# Without locks of the file system.


@pytest.fixture
def no_locks(monkeypatch):
  def has_none(*args):
    raise OSError(errno.EOPNOTSUPP, 'no locks here')

  monkeypatch.setattr(lock.fcntl, 'lockf', has_none)


def write_facts(attempt, beat, state=attempts.RUNNING):
  theirs = {'process': 0, 'processes': 1, 'host': 'there', 'pid': 7, 'began': 0.0, 'time': 0.0}
  attempts.write(attempt, attempts.Facts(**theirs, total_steps=9, beat=beat, state=state))


def test_one_whose_facts_change_holds_it(tmp_path, no_locks):
  with held(tmp_path) as attempt:
    write_facts(attempt, 1)
    stopped = threading.Event()

    def beat():
      for number in itertools.count(2):
        write_facts(attempt, number)
        if stopped.wait(0.05):
          return

    beats = threading.Thread(target=beat)
    beats.start()
    try:
      assert 'in use by process 0 (host there, pid 7)' in refused(tmp_path, patience=1)
    finally:
      stopped.set()
      beats.join()
    write_facts(attempt, 1, attempts.DONE)
    with held(tmp_path, patience=60) as second:  # at once
      assert second.name == 'attempt_0002'


def test_one_whose_facts_stand_still_is_gone(tmp_path, no_locks):
  with held(tmp_path) as attempt:
    write_facts(attempt, 1)
    with held(tmp_path, patience=0.2) as second:
      assert second.name == 'attempt_0002'
