"""Signals that stop a run, and calls that they end early, alone and in processes that agree."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from het_plugin.operations import lock, preemption
from het_plugin.training import exit_codes

ROOT = Path(__file__).parents[2]


def test_it_returns_or_raises_what_the_function_does():
  assert preemption.call(lambda: 3, lambda: False) == 3
  with pytest.raises(KeyError, match='why'):
    preemption.call(lambda: {}['why'], lambda: False)


def test_it_is_left_without_the_function():
  entered, end = threading.Event(), threading.Event()

  def wait():
    entered.set()
    end.wait(60)

  before = time.monotonic()
  with pytest.raises(preemption.Interrupted):
    preemption.call(wait, entered.is_set)
  assert time.monotonic() - before < 20
  end.set()
  with pytest.raises(preemption.Interrupted):  # at once: not even started
    preemption.call(lambda: pytest.fail('it was called'), lambda: True)


# One of two processes. The directory is held by the test; SIGTERM comes to process 1 in a
# compilation of minutes.
PAIR = """
import os, signal, sys, threading, time
import jax
import jax.numpy as jnp
jax.distributed.initialize(
  os.environ['JAX_COORDINATOR_ADDRESS'], 2, int(os.environ['JAX_PROCESS_ID']),
  cluster_detection_method='deactivate',
)
from het_plugin.config import distributed
from het_plugin.operations import lock, preemption
folder, index = sys.argv[1], jax.process_index()

try:
  with lock.held(folder, patience_seconds=0.5):
    pass
except ValueError as error:
  print('refused:', error)

with preemption.PreemptionNotice() as notice:
  def slow():
    time.sleep(index)
    return index
  print('returned:', preemption.call(slow, notice.reached))

  def fail():
    raise KeyError('mine')
  try:
    preemption.call(fail if index else slow, notice.reached)
  except (KeyError, RuntimeError) as error:
    print('raised:', repr(error))

  def step(x):
    for i in range(300):
      noise = jax.random.normal(jax.random.key(i), x.shape)
      x = jnp.sin(x @ x + i) * jnp.cos(jnp.cumsum(x, 0)) + noise
    return x
  lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
  if index:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
  before = time.monotonic()
  try:
    preemption.call(lowered.compile, notice.reached)
  except preemption.Interrupted:
    print(f'left after {time.monotonic() - before:.1f} s')
distributed.exit_at_once(42)
"""


CTRL_C = """
import os, signal, sys, time
from het_plugin.operations import preemption
with preemption.PreemptionNotice() as outer:
  with preemption.PreemptionNotice() as notice:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    print(notice.reached(), flush=True)
    if sys.argv[2] == 'twice':
      os.kill(os.getpid(), signal.SIGINT)
      print('it goes on', flush=True)
  print(outer.reached())
"""


@pytest.mark.parametrize(
  ('arguments', 'code', 'output'),
  [
    (['SIGTERM', 'once'], 0, 'True\nTrue\n'),
    (['SIGINT', 'once'], 0, 'True\nTrue\n'),
    (['SIGINT', 'twice'], 130, 'True\n'),
  ],
)
def test_ctrl_c_counts_as_sigterm_and_twice_leaves_at_once(arguments, code, output):
  command = [sys.executable, '-W', 'ignore', '-c', CTRL_C, *arguments]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
  assert (done.returncode, done.stdout) == (code, output), done.stderr


@pytest.mark.slow
def test_two_processes_agree(tmp_path):
  command = [
    *(sys.executable, '-m', 'launch.local', '--processes=2', '--devices=1', '--'),
    *(sys.executable, '-c', PAIR, str(tmp_path)),
  ]
  environment = {**os.environ, 'JAX_ENABLE_COMPILATION_CACHE': 'false'}
  with lock.held(tmp_path):
    done = subprocess.run(
      command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
  assert done.returncode == exit_codes.PREEMPTED, done.stdout[-3000:]
  of = [re.findall(rf'^\[{i}\] (\w+[: ].*)$', done.stdout, re.M) for i in range(2)]
  for index, lines in enumerate(of):
    refused, returned, raised, left = (
      next(line for line in lines if line.startswith(word))
      for word in ('refused: ', 'returned: ', 'raised: ', 'left after ')
    )
    assert f'model_dir={tmp_path} is in use: process {os.getpid()} on' in refused
    assert returned == f'returned: {index}'
    assert raised == 'raised: ' + (
      "KeyError('mine')" if index else "RuntimeError('Process 1 failed; see its log.')"
    )
    assert float(left.split()[2]) < 20
