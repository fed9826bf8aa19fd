"""Processes that die, stop, hang or fail, and what the others do then; verdicts."""

import dataclasses
import multiprocessing
import re
import signal
import threading
import time

import pytest

from het_plugin.operations import facts, heartbeat, peers, recorder
from het_plugin.training import exit_codes, observer
from launch import local
from tests.training import watched_run

HEARTBEAT, STALL = 4, 8
SLACK = 15  # for a machine that is busy


class Run:
  """Processes of watched_run, which has all that happens."""

  def __init__(self, context, folder, fault, culprit, processes):
    folder.mkdir()
    self.folder = folder
    self._ended = {}
    arguments = [
      *(f'--folder={folder}', f'--fault={fault}', f'--culprit={culprit}'),
      *(f'--heartbeat_timeout_seconds={HEARTBEAT}', f'--stall={STALL}'),
    ]
    environments = local.environments({}, local.free_port(), processes, devices=1)
    self.processes = [
      context.Process(target=watched_run.start, args=(self._path(i), environment, arguments))
      for i, environment in enumerate(environments)
    ]
    for index, process in enumerate(self.processes):
      process.start()
      threading.Thread(target=self._wait, args=(index, process), daemon=True).start()

  def _path(self, index):
    return str(self.folder / f'output-{index}.txt')

  def _wait(self, index, process):
    process.join()
    self._ended[index] = time.time()

  def output(self, index):
    with open(self._path(index)) as file:
      return file.read()

  def end(self, index):
    """(exit code, seconds from the first fault to the end, last line of an error) of a process."""
    deadline = time.time() + 200
    while index not in self._ended:
      assert time.time() < deadline, self.output(index)
      time.sleep(0.05)
    outputs = map(self.output, range(len(self.processes)))
    output = '\n'.join(outputs)
    faults = re.findall(r'^fault at (\S+)$', output, re.M)
    assert faults, output
    fault = float(faults[0])
    code, lines = self.processes[index].exitcode, self.output(index).splitlines()
    # C++ code that aborts at the same time may write more lines.
    errors = [line for line in lines if line.startswith('Error: ')]
    return code, self._ended[index] - fault, errors[-1] if errors else lines[-1]

  def name(self, index):
    return rf'process {index} \(host \S+, pid {self.processes[index].pid}\)'


CASES = {
  'worker killed': ('kill', 1, 2),
  'coordinator killed': ('kill', 0, 2),
  'stopped': ('stop', 1, 2),
  'stuck': ('stuck', 1, 3),
  'interpreter held': ('held', 1, 2),
  'alone, interpreter held': ('held', 0, 1),
  'worker failed': ('raise', 1, 2),
  'coordinator failed': ('raise', 0, 2),
  'all failed': ('setting', -1, 2),
}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """All cases at the same time: they wait most of theirs. Imports are done once, before a fork."""
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(['tests.training.watched_run'])
  folder = tmp_path_factory.mktemp('runs')
  runs = {name: Run(context, folder / name, *case) for name, case in CASES.items()}
  yield runs
  for run in runs.values():
    for process in run.processes:
      process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('case', 'limit'),
  [
    # The end of the connection says so at once; who it was is seen by the beats.
    ('worker killed', HEARTBEAT),
    ('coordinator killed', HEARTBEAT),
    ('stopped', HEARTBEAT),
    ('interpreter held', HEARTBEAT),
  ],
)
def test_one_that_is_silent_is_named(runs, case, limit):
  run, culprit = runs[case], CASES[case][1]
  code, seconds, line = run.end(1 - culprit)
  assert code == exit_codes.LOST
  assert seconds < limit + SLACK
  pattern = rf'Error: no sign of life for \d+ s of {run.name(culprit)}, last seen in phase \w+ at'
  assert re.match(pattern, line), run.output(1 - culprit)
  assert 'in _run_main' in run.output(1 - culprit)  # where it waited


@pytest.mark.slow
def test_one_that_is_stuck_is_named_by_all_with_their_stacks(runs):
  run = runs['stuck']
  pattern = rf'Error: {run.name(1)} has been in phase data at step 20 for \d+ s; the others wait'
  for index in range(3):
    code, seconds, line = run.end(index)
    assert code == exit_codes.LOST and re.match(pattern, line), run.output(index)
    assert STALL < seconds < STALL + SLACK
  assert re.search(r'watched_run.py", line \d+ in <lambda>', run.output(1))


@pytest.mark.slow
def test_one_that_holds_the_interpreter_ends_too(runs):
  code, seconds, _ = runs['alone, interpreter held'].end(0)
  assert code == -signal.SIGALRM
  assert seconds < STALL + HEARTBEAT + SLACK
  assert 'in hold_interpreter' in runs['alone, interpreter held'].output(0)


@pytest.mark.slow
@pytest.mark.parametrize('case', ['worker failed', 'coordinator failed'])
def test_one_that_fails_alone_ends_the_others_as_it_ends(runs, case):
  run, culprit = runs[case], CASES[case][1]
  code, seconds, line = run.end(1 - culprit)
  assert code == exit_codes.FAILED and seconds < SLACK
  assert re.fullmatch(rf'Error: {run.name(culprit)} failed: RuntimeError: no such number', line)
  code, seconds, _ = run.end(culprit)
  assert code == exit_codes.FAILED and seconds < SLACK
  assert 'RuntimeError: no such number\n' in run.output(culprit)
  first, second = facts.read_processes(run.folder / 'attempts' / 'attempt_0001')
  assert first.state == second.state == facts.FAILED
  assert first.message == second.message == line.removeprefix('Error: ')


@pytest.mark.slow
def test_all_that_fail_alike_say_so_themselves(runs):
  run = runs['all failed']
  for index in range(2):
    code, seconds, _ = run.end(index)
    assert code == exit_codes.WRONG_SETTING and seconds < SLACK
    (line,) = re.findall('^Error: .*', run.output(index), re.M)
    assert line == 'Error: fault=setting is wrong. (--verbosity=1 shows where)'


# One process, here.


def beating(folder, followed, **limits):
  return heartbeat.Heartbeat(folder, followed, peers.Limits(**limits), {})


def wait_for(condition):
  deadline = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_the_file_follows_the_run(tmp_path):
  clock = recorder.Recorder(100)
  watch = beating(tmp_path, clock, heartbeat_timeout_seconds=0.5)
  watch.start()
  with clock.phase(observer.EVALUATE):
    clock.tick(7)
    wait_for(lambda: facts.read_processes(tmp_path)[0].step == 7)
    (running,) = facts.read_processes(tmp_path)
  watch.end(None)
  (done,) = facts.read_processes(tmp_path)
  assert (running.step, running.phase, running.state) == (7, 'evaluate', 'running')
  assert (running.process, running.processes, running.total_steps) == (0, 1, 100)
  assert (done.state, done.exit_code, done.began) == ('done', 0, running.began)
  assert done.beat > running.beat and done.ticks == running.ticks + 1


@pytest.mark.parametrize(
  ('error', 'state', 'code', 'message'),
  [
    (exit_codes.Preempted(3), facts.PREEMPTED, 42, 'SIGTERM; step 3 is saved'),
    (RuntimeError('no\nluck'), facts.FAILED, 1, 'RuntimeError: no luck'),
    (ValueError('a=1 is wrong.'), facts.FAILED, 2, 'ValueError: a=1 is wrong.'),
  ],
)
def test_how_it_ended(tmp_path, error, state, code, message):
  watch = beating(tmp_path, recorder.Recorder())
  watch.start()
  watch.end(error)
  (found,) = facts.read_processes(tmp_path)
  assert (found.state, found.exit_code, found.message) == (state, code, message)


class Clock:
  """time, and leaps over it."""

  leap = 0.0

  def monotonic(self):
    return time.monotonic() + self.leap

  def time(self):
    return time.time()


def test_a_machine_that_stood_still_is_not_a_run_that_did(tmp_path, monkeypatch):
  monkeypatch.setattr(heartbeat, 'time', Clock())
  ended = threading.Event()
  monkeypatch.setattr(heartbeat.ending, 'end', lambda *args: ended.set())
  clock = recorder.Recorder(100)
  watch = beating(tmp_path, clock, heartbeat_timeout_seconds=0.1, stall_timeout_seconds=5)
  watch.start()
  for _ in range(3):
    heartbeat.time.leap += 1000
    clock.tick()
    assert not ended.wait(0.1)
  heartbeat.time.leap += 1000
  assert not ended.wait(0.1)
  watch.end(None)
  watch = beating(tmp_path, clock, heartbeat_timeout_seconds=0.1, stall_timeout_seconds=0.1)
  watch.start()
  assert ended.wait(20)
  watch.end(None)


# Verdicts.

FACTS = facts.Facts(
  **{'process': 0, 'processes': 3, 'host': 'h0', 'pid': 10, 'began': 0.0, 'time': 0.0},
  **{'total_steps': 100, 'beat': 5, 'phase': 'step', 'idle_seconds': 61.0, 'ticks': 20, 'step': 7},
)


def peer(number, silent_seconds=0.0, **changes):
  made = peers.Peer()
  changes = {'host': f'h{number}', 'pid': 10 + number} | changes
  made.look(dataclasses.replace(FACTS, process=number, **changes), 1.0)
  made.silent_seconds = silent_seconds
  return made


def test_silence_is_counted_while_the_file_can_be_read():
  one = peers.Peer()
  for found, seconds in ((FACTS, 1), (FACTS, 4), (None, 100), (FACTS, 5)):
    one.look(found, seconds)
  assert one.silent_seconds == 9
  assert peers.silent({1: one}, 10) is None
  one.look(FACTS, 1)
  assert peers.silent({1: one, 2: peer(2, 15, phase='save')}, 10).message == (
    'no sign of life for 15 s of process 0 (host h0, pid 10), last seen in phase step at step 7; '
    'process 2 (host h2, pid 12), last seen in phase save at step 7'
  )
  one.look(dataclasses.replace(FACTS, beat=6), 1)
  assert one.silent_seconds == 0


def test_those_that_have_left_or_never_came_may_be_silent():
  for state in (facts.DONE, facts.PREEMPTED):
    assert peers.silent({1: peer(1, 1000, state=state), 2: peers.Peer()}, 10) is None


@pytest.mark.parametrize(
  ('seen', 'message'),
  [
    (
      {1: peer(1, ticks=18, phase='data'), 2: peer(2)},
      'process 1 (host h1, pid 11) has been in phase data at step 7 for 61 s; the others wait for '
      'it',
    ),
    (
      {1: peer(1)},
      'all have been in phase step at step 7 for 61 s: process 0 (host h0, pid 10), '
      'process 1 (host h1, pid 11)',
    ),
  ],
)
def test_who_is_behind(seen, message):
  assert peers.stalled(FACTS, seen) == peers.Verdict(message, exit_codes.LOST)


def test_one_process_alone_is_stuck_by_itself():
  found = peers.stalled(dataclasses.replace(FACTS, processes=1), {})
  assert found.message == 'this process has been in phase step at step 7 for 61 s'


def test_a_failure_is_passed_on():
  seen = {1: peer(1), 2: peer(2, 50, state=facts.FAILED, message='why', exit_code=2)}
  assert peers.failed(seen) == peers.Verdict('why', 2)


@pytest.mark.parametrize(
  ('error', 'code'),
  [
    (None, 0),
    (SystemExit(), 0),
    (SystemExit(42), 42),
    (SystemExit('Error: x'), 1),
    (ValueError('x'), 2),
    (FileNotFoundError('x'), 2),
    (TypeError('x'), 1),
    # In one process there is nobody to lose.
    (RuntimeError('INTERNAL: CpuCallback error'), 1),
  ],
)
def test_exit_codes(error, code):
  assert exit_codes.of(error) == code


@pytest.mark.parametrize(
  ('error', 'lost'),
  [
    (ValueError('UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:55'), True),
    (RuntimeError('INTERNAL: NCCL operation failed: remote process exited'), True),
    (RuntimeError('RESOURCE_EXHAUSTED: Out of memory'), False),
    (ValueError('batch_size=3 must be divisible by 2.'), False),
    (OSError('UNAVAILABLE: disk'), False),
  ],
)
def test_errors_that_come_of_losing_another_process(monkeypatch, error, lost):
  monkeypatch.setattr('jax.distributed.is_initialized', lambda: True)
  assert exit_codes.is_lost_connection(error) is lost
  assert (exit_codes.of(error) == exit_codes.LOST) is lost
