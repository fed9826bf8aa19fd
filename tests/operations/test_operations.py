"""The observer of a run, without a run."""

import contextlib
import gc
import json
import logging
import time

import pytest

from het_plugin.operations import attempts, goodput, heartbeat, operations
from het_plugin.system import exit_codes
from het_plugin.training import observer
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  monkeypatch.setattr(heartbeat, 'PERIOD_SECONDS', 0.01)


class Writer:
  def __init__(self):
    self.written = []

  def write_scalars(self, step, scalars):
    self.written.append((step, scalars))


@contextlib.contextmanager
def observing(folder, watch=None):
  watch = watch or operations.Operations()
  with watch.observing(observer.ObservedRun(folder, 10)):
    watch.begin()
    yield watch


def messages(folder):
  lines = (folder / 'logs' / 'process-00000.jsonl').read_text().splitlines()
  return [json.loads(line)['message'] for line in lines]


def test_files_follow_the_run(tmp_path, caplog):
  caplog.set_level(logging.INFO, 'het_plugin')
  writer = Writer()
  watch = operations.Operations()
  with observing(tmp_path, watch):
    watch.resumed(4)
    watch.before_step(5)
    watch.after_step(5, None)
    wait_for(lambda: attempts.read_attempts(tmp_path)[1].step == 5)
    watch.leaving(None, writer)
  found = attempts.read_attempts(tmp_path)[1]
  assert (found.start_step, found.step) == (4, 5)
  ((step, scalars),) = writer.written
  assert step == 5
  parts = {f'goodput/{part}_seconds' for part in goodput.PARTS}
  assert scalars.keys() == parts | {'goodput/share', 'goodput/wall_seconds'}
  assert sum(scalars[part] for part in parts) == scalars['goodput/wall_seconds']
  assert messages(tmp_path)[-1].startswith('Goodput ')


@pytest.mark.parametrize(
  ('error', 'message'),
  [
    (exit_codes.Preempted(7), 'SIGTERM; step 7 is saved'),
    (ValueError('no such\nthing'), 'ValueError: no such thing'),
    (KeyboardInterrupt(), 'KeyboardInterrupt'),
  ],
)
def test_how_it_ended(tmp_path, error, message):
  with pytest.raises(type(error)), observing(tmp_path) as watch:
    watch.resumed(0)
    raise error
  found = attempts.read_attempts(tmp_path)[1]
  assert found.message.endswith(message)
  failed = not isinstance(error, exit_codes.Preempted)
  assert len(messages(tmp_path)) == failed


def test_garbage_is_collected_from_the_first_step_on_unless_the_program_decided(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(operations, '_collects_later', False)
  try:
    with observing(tmp_path) as watch:
      gc.disable()
      watch.before_step(1)
      assert not gc.isenabled()
      operations.collect_garbage_later()
      watch.before_step(2)
      assert gc.isenabled()
  finally:
    gc.enable()


def test_a_start_that_is_refused_is_no_attempt(tmp_path):
  with pytest.raises(ValueError, match='shape'), observing(tmp_path):
    assert list(attempts.folders(tmp_path)) == [1]
    raise ValueError('another shape')
  assert not (tmp_path / 'attempts').exists()
  with observing(tmp_path):
    assert list(attempts.folders(tmp_path)) == [1]


def cannot_write(*args):
  raise OSError(28, 'No space left on device')


def test_training_goes_on_where_files_cannot_be_written(tmp_path, caplog, monkeypatch):
  watch = operations.Operations()
  with observing(tmp_path, watch):
    with monkeypatch.context() as full:
      full.setattr(attempts, 'write', cannot_write)
      wait_for(lambda: caplog.records)
      time.sleep(0.1)
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith('Training continues without its ')
    watch.resumed(3)
    wait_for(lambda: attempts.read_attempts(tmp_path)[1].step == 3)


def test_the_start_and_a_beat_do_not_write_at_once(tmp_path, monkeypatch):
  write = attempts.write
  writing = []
  most = set()

  def slow(*args):
    writing.append(None)
    time.sleep(0.05)
    most.add(len(writing))
    write(*args)
    writing.pop()

  monkeypatch.setattr(attempts, 'write', slow)
  with observing(tmp_path):
    pass
  assert most == {1}


def test_a_full_disk_at_the_start_is_one_sentence(tmp_path, monkeypatch):
  monkeypatch.setattr(attempts, 'write', cannot_write)
  words = f'{tmp_path} .*No space left on device'
  with pytest.raises(ValueError, match=words), observing(tmp_path):
    pytest.fail('it began')


@pytest.mark.parametrize(
  'error',
  [
    ConnectionResetError(104, 'Connection reset by peer'),
    OSError('image file is truncated'),
    FileNotFoundError(2, 'No such file or directory', '{}_2/a.png'),
  ],
)
def test_other_errors_are_not_files_that_cannot_be_written(error, tmp_path):
  error.filename = error.filename and error.filename.format(tmp_path)
  with pytest.raises(type(error)), observing(tmp_path):
    raise error
