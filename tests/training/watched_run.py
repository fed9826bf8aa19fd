"""A run without a model, of processes that exchange numbers and watch each other, in which one
comes to harm.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl import flags
from etils import epath
from jax.experimental import multihost_utils

from het_plugin.config import command_line, distributed
from het_plugin.operations import operations, peers, recorder
from het_plugin.training import observer

STEPS, FAULT_STEP = 4000, 20


def hold_interpreter() -> None:
  ctypes.PyDLL(None).sleep(600)  # unlike CDLL, it lets no other thread run


def raise_error() -> None:
  raise RuntimeError('no such number')


def raise_setting() -> None:
  raise ValueError('fault=setting is wrong.')


FAULTS = {
  'none': lambda: None,
  'kill': lambda: os.kill(os.getpid(), signal.SIGKILL),
  'stop': lambda: os.kill(os.getpid(), signal.SIGSTOP),
  'stuck': lambda: time.sleep(600),
  'held': hold_interpreter,
  'raise': raise_error,
  'setting': raise_setting,
}


def define_flags() -> None:
  distributed.define_flags()
  flags.DEFINE_string('folder', '', '')
  flags.DEFINE_enum('fault', 'none', FAULTS, '')
  flags.DEFINE_integer('culprit', 0, 'Which process; -1 for all.')
  flags.DEFINE_float('stall', 60, '')


def main(argv) -> None:
  del argv
  values = flags.FLAGS
  with command_line.one_sentence_errors():
    distributed.initialize(watched=True)
    multihost_utils.process_allgather(np.ones(1))  # connects and compiles
    limits = peers.Limits(values.heartbeat_timeout_seconds, values.stall)
    watch = operations.Operations(limits)
    run = observer.ObservedRun(epath.Path(values.folder), STEPS)
    with watch.observing(run), watch.phase(observer.STEP):
      train(watch.recorder, values.fault, values.culprit)


def train(clock: recorder.Recorder, fault: str, culprit: int) -> None:
  for step in range(STEPS):
    with clock.phase(observer.DATA):
      if step == FAULT_STEP and culprit in (-1, jax.process_index()):
        print(f'fault at {time.time()}', flush=True)
        FAULTS[fault]()
      batch = np.ones(1)
    multihost_utils.process_allgather(batch)
    clock.tick(step + 1)
    time.sleep(0.02)


def start(output: str, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
  """In a process forked for it: the main, as a program of its own."""
  with open(output, 'wb') as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  os.environ.update(environment)
  sys.argv = ['watched_run', *arguments]
  define_flags()
  command_line.run(main)
