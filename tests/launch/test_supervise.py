"""The supervisor, with small commands."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import supervise
from tests.training import elastic_run, toy_run
from tests.waiting import PATIENT, wait_for

ROOT = Path(__file__).parents[2]


def start(folder, code, *flags):
  command = [sys.executable, '-m', 'launch.supervise', f'--folder={folder}', *flags]
  return subprocess.Popen(
    [*command, '--', sys.executable, '-c', code], cwd=ROOT, stderr=subprocess.PIPE, text=True
  )


def log(folder):
  path = folder / 'supervisor.log'
  return path.read_text() if path.exists() else ''


# Counts its starts in a file and is preempted twice.
PREEMPTED_TWICE = """
import pathlib, sys
path = pathlib.Path({path!r})
starts = int(path.read_text()) + 1 if path.exists() else 1
path.write_text(str(starts))
print('start', starts)
sys.exit(3 if starts > 2 else 42)
"""


def test_a_preempted_command_starts_again_so_many_times(tmp_path):
  code = PREEMPTED_TWICE.format(path=str(tmp_path / 'starts'))
  assert start(tmp_path / 'run', code).wait() == 3
  state = supervise.read_state(tmp_path / 'run')
  assert (state['restarts'], state['exit_code']) == (2, 3)
  assert log(tmp_path / 'run').count('start') == 3 + 2  # the supervisor's own lines say restart
  assert start(tmp_path, 'import sys; sys.exit(42)', '--max_restarts=1').wait() == 42
  assert supervise.read_state(tmp_path)['restarts'] == 1


def test_a_killed_command_starts_again(tmp_path, code=137):
  end = 'import os; os.kill(os.getpid(), 9)'
  assert start(tmp_path, end, '--max_failures=1').wait() == code
  state = supervise.read_state(tmp_path)
  assert (state['restarts'], state['failures'], state['exit_code']) == (1, 1, code)
  assert log(tmp_path) == f'[supervise] exit code {code}: restart 1 of 1 after failures\n'


def test_other_codes_do_not_start_again(tmp_path):
  assert start(tmp_path, 'import sys; sys.exit(1)').wait() == 1
  assert start(tmp_path, 'import sys; sys.exit(2)').wait() == 2
  expected = {'restarts': 0, 'failures': 0, 'exit_code': 2}
  assert supervise.read_state(tmp_path).items() >= expected.items()


def test_a_command_that_cannot_be_started_has_a_code(tmp_path):
  command = [sys.executable, '-m', 'launch.supervise', f'--folder={tmp_path}', '--', '/no/such']
  assert subprocess.run(command, cwd=ROOT).returncode == 2
  assert supervise.read_state(tmp_path)['exit_code'] == 2
  for folder, words in (
    ('gs://b/x', 'gs://b/x must be a local folder'),
    ('~/x', '~/x: only a shell expands ~'),
  ):
    wrong = start(folder, '')
    assert words in wrong.communicate()[1] and wrong.returncode == 2


def test_sigterm_lets_the_command_save_and_does_not_start_it_again(tmp_path):
  process = start(tmp_path, PATIENT)
  wait_for(lambda: re.search(r'ready \d+\n', log(tmp_path)))  # print writes it word by word
  process.send_signal(signal.SIGTERM)
  assert process.wait() == 42
  assert re.fullmatch(r'ready \d+\nsaved\n', log(tmp_path))


def test_a_full_disk_does_not_end_the_restarts(tmp_path):
  limit = 2**16
  (tmp_path / 'supervisor.log').write_bytes(bytes(limit))
  code = PREEMPTED_TWICE.replace("print('start', starts)", '').format(path=str(tmp_path / 'starts'))
  _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
  try:
    process = start(tmp_path, code)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert process.wait() == 3
  assert supervise.read_state(tmp_path)['restarts'] == 2


@pytest.mark.parametrize('name', ['supervisor.json', 'supervisor.log'])
def test_a_link_in_the_folder_is_not_followed(tmp_path, name):
  other = tmp_path / 'other'
  other.write_text('mine')
  (tmp_path / name).symlink_to(other)
  process = start(tmp_path, 'print(1)')
  assert name in process.communicate()[1] and process.returncode == 2
  assert other.read_text() == 'mine'


# Notes when it starts, and when it has saved, which it may do when a file is there.
SLOW = """
import os, pathlib, signal, sys, time
def note(word):
  with open({path!r}, 'a') as file:
    print(word, os.getppid(), file=file)
def save(*_):
  while not pathlib.Path({path!r} + '_may_be_saved').exists():
    time.sleep(0.02)
  note('saved')
  sys.exit(42)
signal.signal(signal.SIGTERM, save)
note('ready')
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='prctl')
@pytest.mark.parametrize('stopped', [False, True])
def test_a_restart_waits_for_the_processes_of_a_launcher_that_was_killed(stopped, tmp_path):
  notes = tmp_path / 'notes'
  command = [sys.executable, '-m', 'launch.supervise', f'--folder={tmp_path}', '--max_failures=1']
  command += ['--', sys.executable, '-m', 'launch.local', '--processes=1', '--']
  command += [sys.executable, '-c', SLOW.format(path=str(notes))]

  def read():
    return [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []

  supervisor = subprocess.Popen(command, cwd=ROOT)
  wait_for(lambda: len(read()) == 1)
  os.kill(int(read()[0][1]), signal.SIGKILL)  # the launcher, its parent
  time.sleep(0.5)
  if stopped:  # while it waits, so nothing starts again
    supervisor.terminate()
    time.sleep(0.5)
  tmp_path.joinpath('notes_may_be_saved').touch()
  if stopped:
    assert supervisor.wait() == 137
    assert [word for word, _ in read()] == ['ready', 'saved']
    assert supervise.read_state(tmp_path)['failures'] == 0
    return
  wait_for(lambda: len(read()) == 3)
  assert [word for word, _ in read()] == ['ready', 'saved', 'ready']
  assert int(read()[1][1]) == supervisor.pid
  supervisor.terminate()
  assert supervisor.wait() == 42
  assert supervise.read_state(tmp_path)['failures'] == 1


def test_a_folder_has_one_supervisor(tmp_path):
  first = start(tmp_path, PATIENT)
  wait_for(lambda: 'ready' in log(tmp_path))
  second = start(tmp_path, PATIENT)
  message = second.communicate()[1]
  assert second.returncode == 2
  assert message.startswith(f'Error: {tmp_path} is in use') and str(first.pid) in message
  first.terminate()
  assert first.wait() == 42
  assert json.loads((tmp_path / 'supervisor.json').read_text())['pid'] == first.pid


# The number of processes that can run is in a file.
TWICE_HALVED = """
import pathlib, sys
path = pathlib.Path({path!r})
count = int(path.read_text())
print('processes', sys.argv[1])
path.write_text(str(count // 2))
sys.exit(137 if count > 1 else 0)
"""


def test_a_command_goes_on_with_what_is_left(tmp_path):
  left = tmp_path / 'left'
  left.write_text('4')
  code = TWICE_HALVED.format(path=str(left))
  command = [sys.executable, '-m', 'launch.supervise', f'--folder={tmp_path}', '--max_failures=0']
  command += [f'--available=cat {left}', '--', sys.executable, '-c', code]
  assert subprocess.run([*command, '{n}'], cwd=ROOT).returncode == 0
  assert re.findall(r'^processes (\d)', log(tmp_path), re.M) == ['4', '2', '1']
  assert supervise.read_state(tmp_path)['restarts'] == 0
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 2 and 'needs {n} in the command' in done.stderr


def of_process(number, text):
  """Process ids of the process with this number of a run whose command line has the text."""
  found = []
  for folder in Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):
      environment = (folder / 'environ').read_text()
      if text in (folder / 'cmdline').read_text() and f'JAX_PROCESS_ID={number}\0' in environment:
        found.append(int(folder.name))
  return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='/proc')
def test_a_run_goes_on_with_fewer_processes_and_more_again(tmp_path):
  """Of 4 processes with 2 devices each, 2 are killed and come back: with the same examples, and
  with as many rows on a device at a time, each step has the loss that it has without this.
  """
  run = tmp_path / 'run'
  left = tmp_path / 'left'
  left.write_text('4')
  command = [sys.executable, '-m', 'launch.supervise', f'--folder={tmp_path}', '--max_failures=0']
  command += [f'--available=cat {left}', '--poll_seconds=0.5', '--', sys.executable, '-m']
  command += ['launch.local', '--processes={n}', '--devices=2', '--end_seconds=1', '--']
  process = subprocess.Popen(
    [*command, sys.executable, '-m', 'tests.training.elastic_run', str(run)], cwd=ROOT
  )

  def step():
    with contextlib.suppress(OSError, ValueError):  # the last line may be half written
      return max((row['step'] for row in toy_run.lines(run)), default=0)
    return 0

  try:
    wait_for(lambda: step() > 5)
    left.write_text('2')
    for number in (2, 3):
      for pid in of_process(number, str(run)):
        os.kill(pid, signal.SIGKILL)
    killed = step()
    wait_for(lambda: step() > killed + 3)
    left.write_text('4')
    assert process.wait(timeout=300) == 0
  finally:
    process.kill()
  assert supervise.read_state(tmp_path)['restarts'] == 0
  text = log(tmp_path)
  assert text.count('[supervise] ') == 2
  toy_run.run(
    tmp_path / 'whole', total_steps=elastic_run.TOTAL_STEPS, eval_period=elastic_run.TOTAL_STEPS
  )
  for name in ('train/loss', 'train/gradient_norm', 'training_eval/toy_eval/loss'):
    expected = toy_run.series(tmp_path / 'whole', name)
    assert toy_run.series(run, name) == pytest.approx(expected, abs=1e-5)
