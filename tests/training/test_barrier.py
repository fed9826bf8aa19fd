import concurrent.futures
import threading

import pytest

from het_plugin.training import barrier as barrier_lib


class Client:
  """The coordination service of one process that plays several, each in a thread."""

  def __init__(self, num_processes):
    self._num_processes = num_processes
    self._lock = threading.Lock()
    self._barriers = {}
    self.values = {}

  def key_value_set(self, key, value):
    with self._lock:
      self.values[key] = value

  def key_value_dir_get(self, folder):
    with self._lock:
      return [(key, value) for key, value in self.values.items() if key.startswith(f'{folder}/')]

  def key_value_delete(self, folder):
    with self._lock:
      for key in [key for key in self.values if key.startswith(f'{folder}/')]:
        del self.values[key]

  def wait_at_barrier(self, name, timeout_ms):
    with self._lock:
      barrier = self._barriers.setdefault(name, threading.Barrier(self._num_processes))
    barrier.wait(timeout_ms / 1000)


def meet(*places):
  """What comes of processes that go to these places, one after the other."""
  client = Client(len(places))
  barriers = [barrier_lib.Barrier(client, process) for process in range(len(places))]
  for barrier in barriers:  # each process makes only one
    barrier._folder = 'barrier'

  def go(barrier, keys):
    outcomes = []
    for key in keys:
      try:
        barrier(key=key, timeout_ms=10_000)
        outcomes.append('met')
      except barrier_lib.PeerFailed as error:
        outcomes.append(str(error))
    return outcomes

  with concurrent.futures.ThreadPoolExecutor(len(places)) as executor:
    return client, list(executor.map(go, barriers, places))


def test_all_come_again_and_again_and_little_is_kept():
  client, outcomes = meet(*[['written', 'committed', 'written', 'committed']] * 3)
  assert outcomes == [['met'] * 4] * 3
  assert len(client.values) <= 2 * 3


def test_nobody_waits_for_one_that_skips_a_place():
  """Process 1 has failed to write: it goes to the end at once, the others wait to commit."""
  _, outcomes = meet(['written', 'committed', 'end'], ['end'], ['written', 'committed', 'end'])
  for first, *later in outcomes:
    assert first == 'A process has failed: they are at end, written.'
    assert all(text.startswith('A process has failed before') for text in later)


def test_one_that_does_not_come_at_all():
  client = Client(2)
  barrier = barrier_lib.Barrier(client, 0)
  with pytest.raises(threading.BrokenBarrierError):
    barrier(key='written', timeout_ms=50)
