"""Waiting for what another thread or process does."""

import time
from pathlib import Path

# A program that saves when told to, and ends as a preempted run does.
PATIENT = """
import os, signal, sys, time
def save(*_):
  print('saved', flush=True)
  sys.exit(42)
signal.signal(signal.SIGTERM, save)
print('ready', os.getpid(), flush=True)
time.sleep(60)
"""


def wait_for(condition, seconds=300):
  """Returns once condition() holds; fails after so many seconds, which a busy machine may take."""
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'it did not happen'
    time.sleep(0.02)


def alive(pid):
  """Whether a process runs (Linux); a zombie does not."""
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False
