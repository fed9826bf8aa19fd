"""Overhead of the training loop over the bare compiled step, and how long a checkpoint stops it.

    python -m benchmarks.loop [--json OUT]
    python -m benchmarks.loop --sizes=tiny --pairs=2 --period=5

Compares `train` as a run calls it (prefetched batches, metrics, reports, the check for preemption)
with the same compiled step in a bare loop over one batch on the device. They take turns of --period
steps within one run, and a ratio is that of neighbouring turns, so that other load on the machine
affects both. Every other turn of the loop begins with a checkpoint, written in the background, and
does not count in the ratio. Takes six minutes on two CPU cores, the second command some seconds.
"""

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import collect, make_parser, names
from het_plugin.backbones import vit
from het_plugin.data import TaskInfo
from het_plugin.heads import HetXL, LearnedTemperature
from het_plugin.integrate import Integrator
from het_plugin.models import ClassificationModel
from het_plugin.operations import operations
from het_plugin.system import run_files
from het_plugin.training import actions, checkpoints, optimizers, partitioning
from het_plugin.training import step as step_lib
from het_plugin.training.train import train

NUM_CLASSES = 100
SAVE = 'train/timing/save_seconds'
BACKBONES = {
  'vit_ti': {'variant': 'Ti/16'},
  'tiny': {'variant': 'Ti/4', 'width': 16, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2},
}


def classifier(backbone, num_classes):
  """HET-XL on a ViT, with AdamW."""
  return ClassificationModel(
    vit(pooling='gap', **BACKBONES[backbone]),
    HetXL(num_classes, num_factors=10, temperature=LearnedTemperature()),
    optimizers.adamw(1e-4, weight_decay=0.1, clip_norm=1.0),
    Integrator(num_samples=16),
    Integrator(num_samples=16),
  )


@dataclasses.dataclass(frozen=True)
class Noise:
  """A dataset config of random images in host memory."""

  batch_size: int
  image_size: int
  mixture_or_task_name: str = 'noise'


SIZES = {
  'vit_ti': Noise(batch_size=8, image_size=96),
  'tiny': Noise(batch_size=8, image_size=8),
}


class NoiseIterator:
  """Returns the same batch every time."""

  num_examples = None

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


class Alternate(actions.BaseAction):
  """After every turn of the loop, takes one of the bare step; `turns` has both's seconds a step."""

  def __init__(self, period, batch, trainers):
    self._period = period
    self._batch = batch
    self._trainers = trainers
    self._state = self._resumed = self._step = None
    self.turns = []

  def run(self, train_state, metrics_by_task):
    jax.block_until_ready(train_state)
    loop = self._resumed and time.perf_counter() - self._resumed
    step = int(train_state.step)  # an accelerator may have the next one in flight
    if self._state is None:
      self._state = jax.tree.map(jnp.copy, train_state)
      self._bare_turn()
    bare = self._bare_turn()
    if loop is not None:  # the first turn compiles and fills caches
      self.turns.append((loop / (step - self._step), bare / self._period))
    self._step = step
    self._resumed = time.perf_counter()
    return False

  def _bare_turn(self):
    start = time.perf_counter()
    for _ in range(self._period):
      self._state, _ = self._trainers[0].train_step(self._state, self._batch)
    jax.block_until_ready(self._state)
    return time.perf_counter() - start


def measure(args, size):
  """One row."""
  trainers = []

  class RecordedTrainer(step_lib.Trainer):
    def __init__(self, **kwargs):
      super().__init__(**kwargs)
      trainers.append(self)

  partitioner = partitioning.PjitPartitioner()
  cfg = SIZES[size]
  host = next(NoiseIterator(cfg, partitioner.batch_rows(cfg.batch_size)))
  batch = partitioner.shard_batch(host, cfg.batch_size)
  alternate = Alternate(args.period, batch, trainers)
  with tempfile.TemporaryDirectory() as folder:
    _, state = train(
      model=classifier(size, NUM_CLASSES),
      train_dataset_cfg=cfg,
      train_eval_dataset_cfg=None,
      checkpoint_cfg=checkpoints.CheckpointConfig(
        checkpoints.SaveCheckpointConfig(period=2 * args.period, keep=1)
      ),
      partitioner=partitioner,
      trainer_cls=RecordedTrainer,
      model_dir=folder,
      total_steps=(2 * args.pairs + 1) * args.period,
      eval_steps=1,
      eval_period=args.period,
      stats_period=args.period,
      actions={'TRAIN': [alternate]},
      get_dataset_fn=NoiseIterator,
      observer=operations.Operations(),
      task_info_fn=lambda name: TaskInfo(NUM_CLASSES, False, 3, None, {'train': None}),
    )
    lines = run_files.read_lines(Path(folder) / 'metrics.jsonl')
  stalls = [line[SAVE] for line in lines if SAVE in line]
  plain = alternate.turns[::2]  # every other turn of the loop begins with a checkpoint
  ratios = [bare / loop for loop, bare in plain]
  quartiles = statistics.quantiles(ratios, n=4, method='inclusive')
  bare = statistics.median(bare for _, bare in alternate.turns)
  overhead = statistics.median(loop - bare for loop, bare in plain)
  return {
    'size': size,
    'turns': len(plain),
    'bare_ms': 1e3 * bare,
    'overhead_us': 1e6 * overhead,
    'ratio': statistics.median(ratios),
    'ratio_quartiles': [quartiles[0], quartiles[2]],
    'state_mb': sum(x.nbytes for x in jax.tree.leaves(state)) / 1e6,
    'save_stall_ms': 1e3 * statistics.median(stalls),
    'save_stall_steps': statistics.median(stalls) / bare,
  }


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--sizes', type=names(SIZES), default=list(SIZES), help=','.join(SIZES))
  parser.add_argument('--pairs', type=int, default=12, help='turns without and with a save')
  parser.add_argument('--period', type=int, default=100, help='steps per turn, and per report')
  args = parser.parse_args()
  if args.pairs < 2:
    parser.error(f'--pairs={args.pairs} must be at least 2')
  rows = collect(args.json, len(args.sizes), (measure(args, name) for name in args.sizes))
  for row in rows:
    low, high = row['ratio_quartiles']
    print(
      f'{row["size"]}: {row["ratio"]:.3f} of the steps/s of the bare step (quartiles {low:.3f} to '
      f'{high:.3f}), {row["overhead_us"]:.0f} us per step; a save stops the loop for '
      f'{row["save_stall_steps"]:.2f} steps'
    )


if __name__ == '__main__':
  main()
