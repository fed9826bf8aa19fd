"""The JSON log of a process: what is in it, on a file system and on an object store."""

import json
import logging

import pytest

from het_plugin.operations import logs, run_clock
from het_plugin.training import observer


@pytest.fixture
def ours():
  logger = logging.getLogger('het_plugin.some.module')
  logger.setLevel(logging.INFO)
  yield logger
  logger.setLevel(logging.NOTSET)


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_where_and_what(tmp_path, ours):
  clock = run_clock.RunClock()
  with logs.RunLog(tmp_path, 3, clock), clock.phase(observer.EVALUATE):
    clock.tick(step=7)
    ours.info('loss %.1f', 0.5)
  (line,) = lines(tmp_path / 'logs' / 'process-00003.jsonl')
  assert abs(line.pop('time') - logs.time.time()) < 60
  assert line == {
    **{'level': 'INFO', 'process': 3, 'step': 7, 'phase': 'evaluate'},
    **{'logger': 'het_plugin.some.module', 'message': 'loss 0.5'},
  }


def test_ours_and_the_warnings_of_others(tmp_path, ours):
  other = logging.getLogger('het_plugin_like')
  other.setLevel(logging.INFO)
  with logs.RunLog(tmp_path, 0, run_clock.RunClock()):
    ours.info('a')
    other.info('b')
    other.warning('c')
  ours.info('d')
  assert [x['message'] for x in lines(tmp_path / 'logs' / 'process-00000.jsonl')] == ['a', 'c']


def test_errors_have_their_traceback(tmp_path, ours):
  with logs.RunLog(tmp_path, 0, run_clock.RunClock()) as log:
    try:
      raise ValueError('no such thing')
    except ValueError as error:
      log.error(error)
      ours.exception('caught')
  ended, caught = lines(tmp_path / 'logs' / 'process-00000.jsonl')
  assert ended['message'] == "The run ends: ValueError('no such thing')"
  for line in (ended, caught):
    assert line['level'] == 'ERROR' and 'test_errors_have_their_traceback' in line['exception']


def test_a_restart_appends_also_after_a_line_that_was_cut_short(tmp_path, ours):
  path = tmp_path / 'logs' / 'process-00000.jsonl'
  for message in ('first', 'second'):
    with logs.RunLog(tmp_path, 0, run_clock.RunClock()):
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


def test_a_full_disk_is_told_once(tmp_path, ours, capsys, monkeypatch):
  handler = logs._FileHandler(str(tmp_path / 'log.jsonl'))

  def write(text):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(handler, 'stream', handler.stream)
  monkeypatch.setattr(handler.stream, 'write', write, raising=False)
  for _ in range(3):
    handler.handle(logging.makeLogRecord({'msg': 'x'}))
  assert capsys.readouterr().err.count('No space left on device') == 1


def test_a_full_disk_does_not_hide_what_ended_the_run(tmp_path, ours):
  (tmp_path / 'logs').mkdir()
  (tmp_path / 'logs' / 'process-00000.jsonl').symlink_to('/dev/full')
  with pytest.raises(ZeroDivisionError), logs.RunLog(tmp_path, 0, run_clock.RunClock()):
    ours.info('x')
    raise ZeroDivisionError


def test_where_nothing_can_be_appended_there_are_parts(tmp_path, monkeypatch):
  monkeypatch.setattr(logs, '_PART_BYTES', 15)
  folder = tmp_path / 'logs'
  handler = logs._PartsHandler(logs.epath.Path(folder), 'process-00000')

  def texts():
    return [path.read_text() for path in sorted(folder.iterdir())]

  def log(message):
    handler.handle(logging.makeLogRecord({'msg': message}))

  log('123456789')
  handler.upload(at_once=False)  # too soon
  with pytest.raises(OSError):  # no folder: the lines are kept
    handler.upload(at_once=True)
  folder.mkdir()
  handler.upload(at_once=True)
  assert texts() == ['123456789\n']
  log('abcdefghi')
  handler.upload(at_once=True)
  log('next part')
  handler.upload(at_once=True)
  handler.upload(at_once=True)  # nothing new
  assert texts() == ['123456789\nabcdefghi\n', 'next part\n']
  assert len({path.name.rpartition('.')[0].rpartition('.')[0] for path in folder.iterdir()}) == 1


def test_an_object_store_gets_parts(tmp_path, monkeypatch, ours):
  monkeypatch.setattr(logs.run_files, 'is_remote', lambda path: True)
  with logs.RunLog(tmp_path, 1, run_clock.RunClock()) as log:
    ours.info('hello')
    log.upload(at_once=True)
  (path,) = (tmp_path / 'logs').iterdir()
  assert path.name.startswith('process-00001.2') and path.name.endswith('.000.jsonl')
  assert lines(path)[0]['message'] == 'hello'
