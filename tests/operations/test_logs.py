"""The JSON log of a process: what is in it, on a file system and on an object store."""

import json
import logging
import os
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
    'level': 'INFO',
    'process': 0,
    'step': 7,
    'phase': 'evaluate',
    'logger': 'het_plugin.some.module',
    'message': 'loss 0.5',
  }


def test_what_ended_the_run_is_there_with_its_traceback(tmp_path, ours, caplog):
  with pytest.raises(ValueError), written(tmp_path):
    raise ValueError('no such thing')
  (ended,) = lines(tmp_path)
  assert ended['message'] == "The run ends: ValueError('no such thing')"
  assert ended['level'] == 'ERROR' and 'test_what_ended_the_run_is' in ended['exception']
  assert not caplog.records  # the main says so on the screen


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_a_full_disk_says_nothing_of_its_own(tmp_path, ours, capsys):
  (tmp_path / 'logs').mkdir()
  (tmp_path / 'logs' / 'process-00000.jsonl').symlink_to('/dev/full')
  with written(tmp_path):
    ours.info('hello')
  assert 'Logging error' not in capsys.readouterr().err


def test_an_object_store_gets_none(tmp_path, monkeypatch, ours):
  monkeypatch.setattr(logs.run_files, 'is_remote', lambda path: True)
  with written(tmp_path):
    ours.info('hello')
  assert not list(tmp_path.iterdir())
