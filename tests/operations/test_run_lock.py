"""Locks on run directories, also where the file system has none, and holders that die."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from etils import epath

from het_plugin.operations import run_lock
from het_plugin.training import exit_codes

ROOT = Path(__file__).parents[2]
LOCK = run_lock.NAME


def locked(folder, patience=0.0, beat=0.1):
  return run_lock.locked(folder, patience, beat)


def refused(folder, **settings):
  with pytest.raises(ValueError) as error, locked(folder, **settings):
    pytest.fail('it was free')
  return str(error.value)


def wait_for(condition, seconds=20):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'it did not happen'
    time.sleep(0.02)


def test_a_holder_is_named_and_one_that_was_killed_holds_nothing(tmp_path):
  """Not even by a data worker that it forked and that outlives it."""
  code = f"""
import os, time
from het_plugin.operations import run_lock
with run_lock.locked({str(tmp_path)!r}):
  worker = os.fork()
  if worker:
    print(worker, flush=True)
  time.sleep(60)
"""
  command = [sys.executable, '-W', 'ignore', '-c', code]
  holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  worker = None
  try:
    worker = int(holder.stdout.readline())
    message = refused(tmp_path)
    assert (
      f'{tmp_path} is in use: process {holder.pid} on {socket.gethostname()}, since 2' in message
    )
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    holder.kill()
    holder.wait()
    os.kill(worker, 0)
    with locked(tmp_path):
      assert json.loads((tmp_path / LOCK).read_text())['pid'] == os.getpid()
  finally:
    holder.kill()
    if worker is not None:
      os.kill(worker, signal.SIGKILL)


@pytest.fixture(params=['flock', 'beats'])
def kind(request, monkeypatch):
  """With locks of the file system, and without."""
  if request.param == 'beats':

    def has_none(path, patience):
      raise OSError(errno.EOPNOTSUPP, 'no locks here')

    monkeypatch.setattr(run_lock, '_take', has_none)
  return request.param


def test_one_at_a_time_and_no_trace(kind, tmp_path):
  folder = tmp_path / 'runs' / 'x'
  with locked(folder):
    patience = 0.0 if kind == 'flock' else 2.0  # beats are asked for, under any load
    assert f'process {os.getpid()} on' in refused(folder, patience=patience)
    with locked(tmp_path / 'runs' / 'y'):
      pass
  assert not list(folder.iterdir())
  with pytest.raises(RuntimeError, match='crash'), locked(folder):
    raise RuntimeError('crash')
  assert not list(folder.iterdir())


def test_one_that_ends_is_waited_for(kind, tmp_path):
  entered = []

  def come():
    with locked(tmp_path, patience=20):
      entered.append(json.loads((tmp_path / LOCK).read_text()))

  thread = threading.Thread(target=come)
  with locked(tmp_path):
    thread.start()
    time.sleep(0.5)
    assert not entered
  thread.join(timeout=20)
  assert len(entered) == 1
  assert not list(tmp_path.iterdir())


def test_beats_that_stopped_are_taken_over(tmp_path, monkeypatch):
  monkeypatch.setattr(run_lock, '_NO_LOCKS', (errno.EAGAIN,))
  left = {'host': 'gone', 'pid': 1, 'since': 'long', 'run': 'theirs', 'beat': 7}
  path = epath.Path(tmp_path / LOCK)
  for text in (json.dumps(left), '{"half'):
    path.write_text(text)
    before = time.monotonic()
    release = run_lock._claim(path, patience=0.4, beat=0.1)
    assert time.monotonic() - before < 5
    first = json.loads(path.read_text())
    wait_for(lambda first=first: json.loads(path.read_text() or '{}') not in ({}, first))
    release()
    assert not path.exists()


def test_of_two_that_come_at_once_the_later_writer_has_it(tmp_path):
  path = epath.Path(tmp_path / LOCK)
  theirs = json.dumps({'host': 'there', 'pid': 7, 'since': 'now', 'run': 'theirs', 'beat': 0})

  def overwrite():
    wait_for(path.exists)
    path.write_text(theirs)

  thread = threading.Thread(target=overwrite)
  thread.start()
  with pytest.raises(ValueError, match='process 7 on there'):
    run_lock._claim(path, patience=0, beat=1.0)
  thread.join()
  assert path.read_text() == theirs


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_holder_that_was_taken_over_ends_at_once(tmp_path, monkeypatch, capsys):
  """It stood still for long; to go on would be to write into the other run."""
  codes = []

  def leave(code):
    codes.append(code)
    raise SystemExit

  monkeypatch.setattr(run_lock.os, '_exit', leave)
  path = epath.Path(tmp_path / LOCK)
  release = run_lock._claim(path, patience=0, beat=0.1)
  theirs = {'host': 'there', 'pid': 7, 'since': 'now', 'run': 'theirs', 'beat': 0}
  path.write_text(json.dumps(theirs))
  wait_for(lambda: codes)
  assert codes == [exit_codes.FAILED]
  assert 'process 7 on there' in capsys.readouterr().err
  release()
  assert json.loads(path.read_text()) == theirs


def test_folders_that_cannot_be_written_are_one_sentence(tmp_path):
  file = tmp_path / 'file'
  file.write_text('')
  assert refused(file / 'run') == f'model_dir={file / "run"} cannot be written: Not a directory'
  folder = tmp_path / 'folder'
  folder.mkdir(mode=0o555)
  user = os.geteuid()
  if user == 0:  # whom no mode keeps out
    os.seteuid(65534)
  try:
    assert refused(folder) == f'model_dir={folder} cannot be written: Permission denied'
  finally:
    os.seteuid(user)
