"""SIGTERM and Ctrl-C: before a training, in a compilation, between trainings, twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from het_plugin.system import stopping
from launch import local

ROOT = Path(__file__).parents[2]

# A main that compiles, in C++, for half a minute or more.
COMPILING = """
from het_plugin.system import stopping
stopping.install()
import sys
import jax, jax.numpy as jnp
from etils import epath
if len(sys.argv) > 2:
  with stopping.before_service():
    jax.distributed.initialize(sys.argv[2], 1, 0)
from het_plugin.operations import operations
from het_plugin.training import observer

def step(x):
  for i in range(600):
    noise = jax.random.normal(jax.random.key(i), x.shape)
    x = jnp.sin(x @ x + i) * jnp.cos(jnp.cumsum(x, 0)) + noise
  return x

watch = operations.Operations()
with watch.observing(observer.ObservedRun(epath.Path(sys.argv[1]), 10)):
  watch.begin()
  if len(sys.argv) > 3:
    with watch.phase(observer.STEP):
      print('compiling', flush=True)
      while not stopping.reached():
        pass
    sys.exit('saved')
  with watch.phase(observer.COMPILE):
    lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    print('compiling', flush=True)
    lowered.compile()
print('compiled')
"""

# A main between trainings, and in one that is asked to stop and takes its time to save.
STOPPED = """
from het_plugin.system import stopping
stopping.install()
import os, signal, sys, time
where, number = sys.argv[1], getattr(signal, sys.argv[2])
if where == 'before':
  os.kill(os.getpid(), number)
  time.sleep(20)
with stopping.handled(lambda: True, lambda: None):
  os.kill(os.getpid(), number)
  print(stopping.reached(), flush=True)
  if where == 'twice':
    time.sleep(0.5)
    os.kill(os.getpid(), number)
    time.sleep(20)
print(stopping.requested(), flush=True)
"""


def run(code, *arguments):
  command = [sys.executable, '-W', 'ignore', '-c', code, *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(('number', 'service'), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_compilation_is_left_at_once(number, service, tmp_path):
  """Also with the service of several processes, which would answer after it."""
  address = [f'localhost:{local.free_port()}'] if service else []
  process = subprocess.Popen(
    [sys.executable, '-c', COMPILING, str(tmp_path), *address],
    cwd=ROOT,
    env={**os.environ, 'JAX_ENABLE_COMPILATION_CACHE': 'false'},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == 'compiling\n'
  time.sleep(0.5)
  before = time.monotonic()
  process.send_signal(number)
  output, errors = process.communicate(timeout=300)
  assert process.returncode == 42 and 'compiled' not in output
  assert time.monotonic() - before < 20
  assert 'stopped. There was nothing new to save' in errors and 'Traceback' not in errors
  facts = json.loads((tmp_path / 'attempts/attempt_0001/process-00000.json').read_text())
  assert (facts['state'], facts['exit_code']) == ('preempted', 42)


def test_the_service_hears_of_a_signal_between_steps(tmp_path):
  address = f'localhost:{local.free_port()}'
  process = subprocess.Popen(
    [sys.executable, '-c', COMPILING, str(tmp_path), address, 'step'],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == 'compiling\n'
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=300)
  assert 'saving and exiting after this step' in errors and errors.rstrip().endswith('saved')


@pytest.mark.parametrize(
  ('where', 'number', 'code', 'output'),
  [
    ('before', 'SIGINT', 42, ''),
    ('once', 'SIGTERM', 0, 'True\nTrue\n'),
    ('twice', 'SIGINT', 130, 'True\n'),
  ],
)
def test_when_it_ends(where, number, code, output):
  done = run(STOPPED, where, number)
  assert done.returncode == code, done.stderr
  assert done.stdout == output
  assert 'Traceback' not in done.stderr


def test_the_main_of_training_stops_while_it_imports(tmp_path):
  model_dir = f'--gin.MODEL_DIR="{tmp_path}"'  # a busy machine may be beyond the imports: 42, too
  files = '--gin_file=gin/runs/digits_smoke.gin', '--gin_file=gin/heads/det.gin'
  process = subprocess.Popen(
    [sys.executable, '-m', 'het_plugin.train', *files, model_dir],
    cwd=ROOT,
    stderr=subprocess.PIPE,
    text=True,
  )
  status = Path(f'/proc/{process.pid}/status')
  caught = 1 << (signal.SIGTERM - 1)

  def handled():
    return int(status.read_text().partition('SigCgt:')[2].split()[0], 16) & caught

  while not handled():
    assert process.poll() is None
  process.terminate()
  _, errors = process.communicate(timeout=300)
  assert process.returncode == 42 and 'Traceback' not in errors, errors


def test_without_a_main_the_training_alone_stops():
  """As in a notebook; the handlers are put back."""
  before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  with stopping.handled(lambda: False, lambda: pytest.fail('it leaves')):
    assert not stopping.reached()
    os.kill(os.getpid(), signal.SIGINT)
    assert stopping.reached() and stopping.requested()
  assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# A data worker ends when it is told to, and leaves its parent alone. After other tests this process
# has threads of JAX, so the fork is in a process of its own.
WORKER = """
from het_plugin.system import stopping
import os, signal, time
with stopping.handled(lambda: False, lambda: print('it leaves')):
  begun, begin = os.pipe()
  if (worker := os.fork()) == 0:
    os.write(begin, b'.')
    time.sleep(60)
    os._exit(0)
  os.read(begun, 1)  # Python drops a signal that comes while it forks
  os.kill(worker, signal.SIGTERM)
  print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), stopping.reached())
"""


def test_a_worker_ends_on_its_own_signal():
  command = [sys.executable, '-c', WORKER]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert result.stdout.split() == [str(-signal.SIGTERM), 'False']
