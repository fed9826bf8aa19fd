"""The JSON log of a process: what is in it, on a file system and on an object store."""

import json
import logging

import pytest

from het_plugin.operations import run_clock, run_logs
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
  with run_logs.RunLog(tmp_path, 3, clock), clock.phase(observer.EVALUATE):
    clock.tick(step=7)
    ours.info('loss %.1f', 0.5)
  (line,) = lines(tmp_path / 'logs' / 'process-00003.jsonl')
  assert abs(line.pop('time') - run_logs.time.time()) < 60
  assert line == {
    **{'level': 'INFO', 'process': 3, 'step': 7, 'phase': 'evaluate'},
    **{'logger': 'het_plugin.some.module', 'message': 'loss 0.5'},
  }


def test_ours_and_the_warnings_of_others(tmp_path, ours):
  other = logging.getLogger('het_plugin_like')
  other.setLevel(logging.INFO)
  with run_logs.RunLog(tmp_path, 0, run_clock.RunClock()):
    ours.info('a')
    other.info('b')
    other.warning('c')
  ours.info('d')
  assert [x['message'] for x in lines(tmp_path / 'logs' / 'process-00000.jsonl')] == ['a', 'c']


def test_errors_have_their_traceback(tmp_path, ours):
  with run_logs.RunLog(tmp_path, 0, run_clock.RunClock()) as log:
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
    with run_logs.RunLog(tmp_path, 0, run_clock.RunClock()):
      ours.info(message)
    with path.open('a') as file:
      file.write('{"time": 1')
  text = path.read_text().splitlines()
  assert [json.loads(text[i])['message'] for i in (0, 2)] == ['first', 'second']
  assert text[1] == text[3] == '{"time": 1'


def test_the_size_is_bounded(tmp_path, ours):
  handler = run_logs._FileHandler(str(tmp_path / 'log.jsonl'), max_bytes=1000)
  for i in range(100):
    handler.handle(logging.makeLogRecord({'msg': f'{i:099}'}))
  handler.close()
  assert sorted(path.name for path in tmp_path.iterdir()) == ['log.jsonl', 'log.jsonl.1']
  assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
  assert (tmp_path / 'log.jsonl').read_text().endswith('99\n')


def test_a_full_disk_is_told_once(tmp_path, ours, capsys, monkeypatch):
  handler = run_logs._FileHandler(str(tmp_path / 'log.jsonl'))

  def write(text):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(handler, 'stream', handler.stream)
  monkeypatch.setattr(handler.stream, 'write', write, raising=False)
  for _ in range(3):
    handler.handle(logging.makeLogRecord({'msg': 'x'}))
  assert capsys.readouterr().err.count('No space left on device') == 1


def test_where_nothing_can_be_appended_there_are_parts(tmp_path):
  now = 0.0
  handler = run_logs._PartsHandler(
    run_logs.epath.Path(tmp_path), 'process-00000', 20, 30.0, now=lambda: now
  )

  def texts():
    return [path.read_text() for path in sorted(tmp_path.iterdir())]

  def log(message):
    handler.handle(logging.makeLogRecord({'msg': message}))

  log('123456789')
  handler.upload(at_once=False)
  assert texts() == []  # too soon
  now = 31.0
  handler.upload(at_once=False)
  assert texts() == ['123456789\n']
  log('abcdefghi')
  log('next part')
  log('and this!')
  log('the third')
  handler.upload(at_once=True)
  assert texts() == ['123456789\nabcdefghi\n', 'next part\nand this!\n', 'the third\n']
  assert len({path.name.rpartition('.')[0].rpartition('.')[0] for path in tmp_path.iterdir()}) == 1


def test_a_part_that_could_not_be_written_is_kept(tmp_path):
  folder = tmp_path / 'logs'
  handler = run_logs._PartsHandler(run_logs.epath.Path(folder), 'process-00000', 20)
  for message in ('123456789', 'abcdefghi', 'next part'):
    handler.handle(logging.makeLogRecord({'msg': message}))
  with pytest.raises(OSError):
    handler.upload(at_once=True)
  folder.mkdir()
  handler.upload(at_once=True)
  assert [p.read_text() for p in sorted(folder.iterdir())] == [
    '123456789\nabcdefghi\n',
    'next part\n',
  ]
  handler.upload(at_once=True)  # nothing new


def test_an_object_store_gets_parts(tmp_path, monkeypatch, ours):
  monkeypatch.setattr(run_logs.run_files, 'is_remote', lambda path: True)
  with run_logs.RunLog(tmp_path, 1, run_clock.RunClock()) as log:
    ours.info('hello')
    log.upload(at_once=True)
  (path,) = (tmp_path / 'logs').iterdir()
  assert path.name.startswith('process-00001.2') and path.name.endswith('.000.jsonl')
  assert lines(path)[0]['message'] == 'hello'
