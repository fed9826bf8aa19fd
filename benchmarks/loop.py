"""The training loop over a bare jitted step, and how long it stands still for a checkpoint.

    python benchmarks/loop.py [--json OUT]
    python benchmarks/loop.py --sizes=tiny --pairs=2 --period=5

One side is `train` as a run calls it: batches prefetched from the host to the device, metrics,
a report every --period steps, the check for preemption. The other is the same compiled step in a
loop of its own, on a batch that is on the device already. They take turns of --period steps within
one run, so that whatever else the machine does meets both; a ratio is that of neighbouring turns.
Every other turn of the loop begins with a checkpoint, which is written in the background, and is
followed by one of the same state for which everything waits. Those turns do not enter the ratio.
Takes six minutes on two CPU cores, the second line some seconds.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from command_line import names, print_table, write_json
from training_model import classifier

from het_plugin.data import TaskInfo
from het_plugin.operations import run_clock
from het_plugin.training import actions, checkpoints, partitioning
from het_plugin.training import step as step_lib
from het_plugin.training.train import train

NUM_CLASSES = 100


@dataclasses.dataclass(frozen=True)
class Noise:
  """A DatasetConfig of random images that are on the host already."""

  batch_size: int
  image_size: int
  mixture_or_task_name: str = 'noise'


SIZES = {
  'vit_ti': Noise(batch_size=8, image_size=96),
  'tiny': Noise(batch_size=8, image_size=8),
}


class NoiseIterator:
  """Gives the same batch again and again."""

  num_batches = None

  def __init__(self, cfg, rows):
    rng = np.random.default_rng(0)
    side = cfg.image_size
    self._batch = {
      'image': rng.uniform(-1, 1, (len(rows), side, side, 3)).astype(np.float32),
      'label': rng.integers(NUM_CLASSES, size=(len(rows), 1), dtype=np.int32),
      'index': np.asarray(rows, np.int32),
      'mask': np.ones(len(rows), np.float32),
    }
    self.element_spec = {
      name: jax.ShapeDtypeStruct((cfg.batch_size, *x.shape[1:]), x.dtype)
      for name, x in self._batch.items()
    }
    self._position = 0

  def __next__(self):
    self._position += self.element_spec['index'].shape[0]
    return self._batch

  def get_state(self):
    return {'position': self._position}


@dataclasses.dataclass(frozen=True)
class Turn:
  """A turn of the loop and the turn of the bare step after it, in seconds.

  save: how much of the loop's the save took; 0 without one.
  blocking_save: of one for which everything waits; 0 where the loop saved nothing.
  """

  loop: float
  bare: float
  save: float
  blocking_save: float


class Alternate(actions.BaseAction):
  """After every turn of the loop, one of the bare step."""

  def __init__(self, period, bare_batch, checkpointer, recorded):
    self._period = period
    self._batch = bare_batch
    self._checkpointer = checkpointer
    self._recorded = recorded
    self._state = None
    self._resumed = None
    self._saved = 0.0
    self.turns = []

  def run(self, train_state, metrics_by_task):
    jax.block_until_ready(train_state)
    loop = None if self._resumed is None else time.perf_counter() - self._resumed
    total_saved = self._recorded['clock'].snapshot().seconds.get(run_clock.SAVE, 0.0)
    saved, self._saved = total_saved - self._saved, total_saved
    if self._state is None:
      self._state = jax.tree.map(jnp.copy, train_state)
      self._bare_turn()
    bare = self._bare_turn()
    blocking = self._blocking_save() if saved else 0.0
    if loop is not None:  # the first turn compiles and fills caches
      self.turns.append(Turn(loop, bare, saved, blocking))
    self._resumed = time.perf_counter()
    return False

  def _bare_turn(self):
    step = self._recorded['trainer'].train_step
    start = time.perf_counter()
    for _ in range(self._period):
      self._state, _ = step(self._state, self._batch)
    jax.block_until_ready(self._state)
    return time.perf_counter() - start

  def _blocking_save(self):
    start = time.perf_counter()
    self._checkpointer.save(int(self._state.step), self._state, {}, {})
    self._checkpointer.wait_until_finished()
    return time.perf_counter() - start


def measure(args, size, folder):
  """The turns of one run, and the bytes of its state."""
  recorded = {}

  class RecordedTrainer(step_lib.Trainer):
    def __init__(self, **kwargs):
      super().__init__(**kwargs)
      recorded['trainer'] = self

  class RecordedClock(run_clock.RunClock):
    def __init__(self, **settings):
      super().__init__(**settings)
      recorded['clock'] = self

  partitioner = partitioning.PjitPartitioner()
  cfg = SIZES[size]
  host = next(NoiseIterator(cfg, partitioner.batch_rows(cfg.batch_size)))
  save = checkpoints.SaveCheckpointConfig(period=2 * args.period, keep=1)
  checkpointer = checkpoints.Checkpointer(folder / 'blocking', save)
  alternate = Alternate(
    args.period, partitioner.shard_batch(host, cfg.batch_size), checkpointer, recorded
  )
  unrecorded, run_clock.RunClock = run_clock.RunClock, RecordedClock
  try:
    _, state = train(
      model=classifier(size, NUM_CLASSES),
      train_dataset_cfg=cfg,
      train_eval_dataset_cfg=None,
      checkpoint_cfg=checkpoints.CheckpointConfig(save),
      partitioner=partitioner,
      trainer_cls=RecordedTrainer,
      model_dir=folder / 'run',
      total_steps=(2 * args.pairs + 1) * args.period,
      eval_steps=1,
      eval_period=args.period,
      stats_period=args.period,
      actions={'TRAIN': [alternate]},
      get_dataset_fn=NoiseIterator,
      task_info_fn=lambda name: TaskInfo(NUM_CLASSES, False, 3, None, {'train': None}),
    )
  finally:
    run_clock.RunClock = unrecorded
    checkpointer.close()
  return alternate.turns, sum(x.nbytes for x in jax.tree.leaves(state))


def row_of(name, period, turns, state_bytes):
  plain = [turn for turn in turns if not turn.save]
  saving = [turn for turn in turns if turn.save]
  ratios = [turn.bare / turn.loop for turn in plain]
  quartiles = statistics.quantiles(ratios, n=4, method='inclusive')
  bare = statistics.median(turn.bare for turn in turns) / period
  overhead = statistics.median(turn.loop - turn.bare for turn in plain) / period
  stall = statistics.median(turn.save for turn in saving)
  blocking = statistics.median(turn.blocking_save for turn in saving)
  return {
    'size': name,
    'turns': len(plain),
    'bare_ms': 1e3 * bare,
    'overhead_us': 1e6 * overhead,
    'ratio': statistics.median(ratios),
    'ratio_quartiles': [quartiles[0], quartiles[2]],
    'state_mb': state_bytes / 1e6,
    'save_stall_ms': 1e3 * stall,
    'save_stall_steps': stall / bare,
    'blocking_save_ms': 1e3 * blocking,
    'stall_over_blocking': stall / blocking,
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--sizes', type=names(SIZES), default=list(SIZES), help=','.join(SIZES))
  parser.add_argument('--pairs', type=int, default=12, help='turns without and with a save')
  parser.add_argument('--period', type=int, default=100, help='steps of a turn, and of a report')
  parser.add_argument('--json', type=Path, help='write the rows here')
  args = parser.parse_args()
  if args.pairs < 2:
    parser.error(f'--pairs={args.pairs} must be at least 2')
  rows = []
  for name in args.sizes:
    with tempfile.TemporaryDirectory() as folder:
      rows.append(row_of(name, args.period, *measure(args, name, Path(folder))))
  print_table(list(rows[0]), [list(row.values()) for row in rows])
  write_json(args.json, rows)
  for row in rows:
    low, high = row['ratio_quartiles']
    print(
      f'{row["size"]}: {row["ratio"]:.3f} of the steps/s of the bare step (quartiles {low:.3f} to '
      f'{high:.3f}), {row["overhead_us"]:.0f} us a step; a save stops the loop for '
      f'{row["save_stall_steps"]:.2f} steps, {row["stall_over_blocking"]:.2f} of a blocking one'
    )


if __name__ == '__main__':
  main()
