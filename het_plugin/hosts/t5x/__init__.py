"""Adapters with which t5x (https://github.com/google-research/t5x) runs our models: docs/t5x.md.

The modules import t5x, which is on GitHub only. gin/t5x/train.gin imports `engine`, which registers
`CONFIGURABLES`, and gin/t5x/stock.gin imports `hooks`, which registers `HOOKS`. Models, heads and
seqio tasks do not depend on this package and work under t5x without it.
"""

# Our actions and optimizer, with names that t5x does not use.
HOOKS = {
  'actions': ('hosted_actions',),
  'optimizers': ('adamw',),
  'het_plugin.training.learning_rates': ('unfreeze_at',),
  'het_plugin.training.optimizers': ('warmup_schedule',),
}

# Names that runs of gin/runs bind when t5x trains, evaluates and infers.
CONFIGURABLES = {
  'datasets': ('get_dataset', 'get_eval_datasets', 'task_name'),
  'checkpoints': ('CheckpointConfig', 'TrainStateInitializer', 'find_checkpoint'),
  'config': ('summarize_config', 'summarize_evaluation'),
  'partitioning': ('PjitPartitioner',),
  'trainer': ('Trainer',),
  'het_plugin.data.pipeline': ('DatasetConfig', 'total_steps'),
  'het_plugin.training.actions': ('TerminateOnNanAction', 'EarlyStoppingAction'),
  'het_plugin.training.checkpoints': ('RestoreCheckpointConfig',),
  't5x.partitioning': ('standard_logical_axis_rules',),
  't5x.utils': ('SaveCheckpointConfig',),
  't5x.infer': ('write_inferences_to_file',),
  'seqio': ('Evaluator', 'PyLoggingLogger', 'TensorBoardLogger', 'JSONLogger'),
}
