"""Progress on a terminal and in a log."""

import io
import time

import jax
import pytest

from het_plugin.reporting.progress import Progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_log_gets_a_line_now_and_then():
  log = io.StringIO()
  with Progress('train', 2000, done=500, seconds=0.0, stream=log) as progress:
    progress.update(250)
    progress.update(1000, 'loss 2.5')
  first, second = log.getvalue().splitlines()
  assert first.startswith('train: 750 of 2,000 images, ') and '/s, ETA 0:00:' in first
  assert second.startswith('train: 1,750 of 2,000 images, ') and '/s, loss 2.5, ETA' in second
  assert progress.count == 1750


def test_the_rate_leaves_out_a_first_update_that_compiles(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  log = io.StringIO()
  with Progress('train', 1000, stream=log) as progress:
    for now[0] in (60.0, 61.0, 70.0):
      progress.update(10)
  assert log.getvalue() == 'train: 30 of 1,000 images, 2/s, ETA 0:08:05\n'


def test_a_terminal_gets_a_bar():
  terminal = Terminal()
  with Progress('train', 2000, done=500, stream=terminal) as progress:
    progress.update(250)
  assert 'train:  25%' in terminal.getvalue() and '500 of 2,000 images' in terminal.getvalue()


@pytest.mark.parametrize('stream', [Terminal, io.StringIO])
def test_a_short_loop_shows_nothing(stream, monkeypatch):
  now = [0.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  stream = stream()
  with Progress('fit', 10, stream=stream, first=2.0) as progress:
    for now[0] in (0.5, 1.9):
      progress.update()
    assert stream.getvalue() == ''
    now[0] = 2.1
    progress.update()
    assert '3 of 10 images' in stream.getvalue()


@pytest.mark.parametrize('stream', [Terminal, io.StringIO])
def test_other_processes_only_count(stream, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  stream = stream()
  with Progress('train', 10, seconds=0.0, stream=stream) as progress:
    progress.update(4)
  assert stream.getvalue() == '' and progress.count == 4
