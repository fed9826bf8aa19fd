"""Writes down what each process of a run does and which examples it trains on.

FOLDER/process-N.jsonl gets a line, with its time in seconds, whenever process N
  enters or exits a phase of the run (het_plugin/operations/run_clock.py);
  is at a step: the one it resumes from, 0 if from none, and each that is done;
  begins a step: the rows of the global batch that its devices hold, the index of the example in
    each, and a checksum of all that the batch says of it.

A line is with the operating system before the process goes on, so that SIGKILL loses none.
"""

import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from het_plugin.operations import run_clock
from het_plugin.training import step as step_lib


class Recorder:
  """Appends lines to a process's file."""

  def __init__(self, folder: Path):
    """Opens the file of this process, whose number the launcher says."""
    folder.mkdir(parents=True, exist_ok=True)
    self._file = open(folder / f'process-{os.environ.get("JAX_PROCESS_ID", "0")}.jsonl', 'ab')

  def write(self, **event: Any) -> None:
    self._file.write(json.dumps({'time': time.time(), **event}).encode() + b'\n')
    self._file.flush()


def install(recorder: Recorder) -> None:
  """Lets the runs of this process be recorded."""

  class RecordedClock(run_clock.RunClock):
    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
      with super().phase(name):
        recorder.write(enter=name)
        yield
      recorder.write(exit=name)

    def tick(self, step: int | None = None) -> None:
      super().tick(step)
      if step is not None:
        recorder.write(at=step)

  train_step = step_lib.Trainer.train_step

  def recorded_step(self, train_state, batch):
    recorder.write(begin=int(train_state.step) + 1, **batch_rows(batch))
    return train_step(self, train_state, batch)

  run_clock.RunClock = RecordedClock
  step_lib.Trainer.train_step = recorded_step


def batch_rows(batch: Mapping[str, jax.Array]) -> dict[str, list[int]]:
  """The rows of a global batch [B, ...] that the devices of this process hold.

  Returns:
    rows: their numbers, ascending, each once; index: of the example in each; checksum: CRC-32 of
    each row of all arrays.
  """
  held = {name: _local_rows(x) for name, x in sorted(batch.items())}
  rows = sorted(held['index'])
  checksum = dict.fromkeys(rows, 0)
  for values in held.values():
    for row in rows:
      checksum[row] = zlib.crc32(values[row].tobytes(), checksum[row])
  return {
    'rows': rows,
    'index': [int(held['index'][row]) for row in rows],
    'checksum': [checksum[row] for row in rows],
  }


def _local_rows(x: jax.Array) -> dict[int, np.ndarray]:
  """{row: value}; devices along the model axis hold the same ones."""
  rows = {}
  for shard in x.addressable_shards:
    start = shard.index[0].start or 0
    for offset, value in enumerate(np.asarray(shard.data)):
      rows[start + offset] = value
  return rows
