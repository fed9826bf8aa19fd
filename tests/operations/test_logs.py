"""The JSON log of a process: what is in it, on a file system and on an object store."""

import json
import logging
import time

import pytest

from het_plugin.operations import logs, recorder
from het_plugin.training import observer


@pytest.fixture
def ours():
  logger = logging.getLogger('het_plugin.some.module')
  logger.setLevel(logging.INFO)
  yield logger
  logger.setLevel(logging.NOTSET)


def written(folder, followed=None):
  return logs.written(folder, followed or recorder.Recorder())


def lines(folder):
  text = (folder / 'logs' / 'process-00000.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_a_line_says_who_where_and_what(tmp_path, ours):
  other = logging.getLogger('het_plugin_like')
  other.setLevel(logging.INFO)
  followed = recorder.Recorder()
  with written(tmp_path, followed), followed.phase(observer.EVALUATE):
    followed.tick(step=7)
    ours.info('loss %.1f', 0.5)
    other.info('of others, warnings only')
    other.warning('c')
  ours.info('d')
  line, warning = lines(tmp_path)
  assert warning['message'] == 'c'
  assert abs(line.pop('time') - time.time()) < 60
  assert line == {
    **{'level': 'INFO', 'process': 0, 'step': 7, 'phase': 'evaluate'},
    **{'logger': 'het_plugin.some.module', 'message': 'loss 0.5'},
  }


def test_what_ended_the_run_is_there_with_its_traceback(tmp_path, ours, caplog):
  with pytest.raises(ValueError), written(tmp_path):
    raise ValueError('no such thing')
  (ended,) = lines(tmp_path)
  assert ended['message'] == "The run ends: ValueError('no such thing')"
  assert ended['level'] == 'ERROR' and 'test_what_ended_the_run_is' in ended['exception']
  assert not caplog.records  # the main says so on the screen


def test_a_restart_appends_also_after_a_line_that_was_cut_short(tmp_path, ours):
  path = tmp_path / 'logs' / 'process-00000.jsonl'
  for message in ('first', 'second'):
    with written(tmp_path):
      ours.info(message)
    with path.open('a') as file:
      file.write('{"time": 1')
  text = path.read_text().splitlines()
  assert [json.loads(text[i])['message'] for i in (0, 2)] == ['first', 'second']
  assert text[1] == text[3] == '{"time": 1'


def test_the_size_is_bounded(tmp_path, ours, monkeypatch):
  monkeypatch.setattr(logs, '_FILE_BYTES', 1000)
  handler = logs._FileHandler(str(tmp_path / 'log.jsonl'))
  for i in range(100):
    handler.handle(logging.makeLogRecord({'msg': f'{i:099}'}))
  handler.close()
  assert sorted(path.name for path in tmp_path.iterdir()) == ['log.jsonl', 'log.jsonl.1']
  assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
  assert (tmp_path / 'log.jsonl').read_text().endswith('99\n')


def test_a_full_disk_is_told_once_and_does_not_hide_what_ended_the_run(tmp_path, ours, capsys):
  (tmp_path / 'logs').mkdir()
  (tmp_path / 'logs' / 'process-00000.jsonl').symlink_to('/dev/full')
  with pytest.raises(ZeroDivisionError), written(tmp_path):
    ours.info('x')
    ours.info('y')
    raise ZeroDivisionError
  assert capsys.readouterr().err.count('No space left on device') == 1


def test_an_object_store_gets_none(tmp_path, monkeypatch, ours):
  monkeypatch.setattr(logs.run_files, 'is_remote', lambda path: True)
  with written(tmp_path):
    ours.info('hello')
  assert not list(tmp_path.iterdir())
