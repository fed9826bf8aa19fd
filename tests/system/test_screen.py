"""What a main shows of what is logged."""

import logging
import os
import sys
import types

import pytest

from het_plugin.system import screen


def record(path, level, message, name='absl'):
  return logging.LogRecord(name, level, path, 1, message, None, None)


OURS = screen.__file__


@pytest.mark.parametrize(
  ('path', 'level', 'message', 'shown'),
  [
    (OURS, logging.INFO, 'step 50/700', True),
    (OURS, logging.INFO, 'a table\nof many lines', False),
    ('/site-packages/orbax/checkpoint/x.py', logging.INFO, 'chatter', False),
    ('/site-packages/orbax/checkpoint/x.py', logging.WARNING, 'a warning', True),
  ],
)
def test_short_lines_of_this_package_and_warnings_are_shown(path, level, message, shown):
  assert screen.is_shown(record(path, level, message)) is shown


def test_advice_of_tensorflow_is_not_shown_and_its_errors_are():
  assert not screen.is_shown(record('/tf.py', logging.WARNING, 'retracing', 'tensorflow'))
  assert screen.is_shown(record('/tf.py', logging.ERROR, 'no memory', 'tensorflow'))


@pytest.mark.parametrize(('path', 'name'), [('/orbax/x.py', 'absl'), ('/events.py', 'asyncio')])
def test_a_write_that_fails_is_told_by_training_alone(path, name):
  failed = record(path, logging.ERROR, 'save failed', name)
  assert screen.is_shown(failed)
  failed.exc_info = (OSError, OSError('disk full'), None)
  assert not screen.is_shown(failed)


@pytest.mark.parametrize(('message', 'shown'), [('Event loop is closed', False), ('other', True)])
def test_nor_do_the_arrays_that_were_still_being_written_tell_it(monkeypatch, message, shown):
  told = []
  monkeypatch.setattr(sys, '__unraisablehook__', told.append)
  screen.show_unraisable(types.SimpleNamespace(exc_value=RuntimeError(message)))
  assert bool(told) is shown


def native(monkeypatch, capfd):
  monkeypatch.delitem(sys.modules, 'tensorflow', raising=False)
  with pytest.raises(ValueError), screen.without_native_lines():
    os.write(2, b'I0000 00:00:1795373126.290662    2334 port.cc:153] oneDNN is on\n')
    os.write(2, b'something else\n')
    raise ValueError
  return capfd.readouterr().err


def test_lines_of_cpp_libraries_are_kept_back_unless_verbose(monkeypatch, capfd):
  assert native(monkeypatch, capfd) == 'something else\n'
  monkeypatch.setattr(screen, 'is_verbose', lambda: True)
  assert 'oneDNN is on' in native(monkeypatch, capfd)
