"""The built-in t5x-style trainer: it needs a model with the t5x interface and `BaseAction`s."""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:
  from het_plugin.training import checkpoint_reader, checkpoints, class_names, optimizers, state

CONFIGURABLES = {
  'actions': ('TerminateOnNanAction', 'EarlyStoppingAction'),
  'checkpoints': ('CheckpointConfig', 'SaveCheckpointConfig', 'RestoreCheckpointConfig'),
  'nonfinite': ('NonFinitePolicy',),
  'late_noise': ('LateNoise',),
  'learning_rates': ('unfreeze_at',),
  'optimizers': ('adamw', 'warmup_schedule', 'with_ema'),
  'partitioning': ('PjitPartitioner', 'standard_logical_axis_rules'),
  'step': ('Trainer',),
  'train': ('train',),
}
# Settings that may change between two starts of a run without changing its results
# (config/changes.py).
SAME_RESULTS = (
  'train.model_dir',
  'train.partitioner',
  'train.total_steps',
  'train.actions',
  'train.train_eval_dataset_cfg',
  'train.infer_eval_dataset_cfg',
  'train.eval_steps',
  'train.eval_period',
  'train.stats_period',
  'train.profile_steps',
  'train.profiler_port',
  'train.nonfinite',
  'train.evaluate_again',
  '*.num_microbatches',
  '*.norm_groups',
  'with_ema.evaluate',
  # Not SaveCheckpointConfig.dtype, which rounds the parameters that a run resumes from.
  'SaveCheckpointConfig.period',
  'SaveCheckpointConfig.keep',
  'CheckpointConfig.restore',
)

__getattr__, _ = faces.on_first_use(__name__)
