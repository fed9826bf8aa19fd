"""The built-in t5x-style trainer: knows a model by t5x's surface, an action by its base class."""

CONFIGURABLES = {
  'actions': ('TerminateOnNanAction', 'EarlyStoppingAction'),
  'checkpoints': ('CheckpointConfig', 'SaveCheckpointConfig', 'RestoreCheckpointConfig'),
  'held_out_temperature': ('HeldOutTemperatureTrainer', 'temperature_optimizer'),
  'loss_spikes': ('LossSpikes',),
  'nonfinite': ('NonFinitePolicy',),
  'optimizers': ('adamw', 'warmup_schedule'),
  'partitioning': ('PjitPartitioner', 'standard_logical_axis_rules'),
  'step': ('Trainer',),
  'train': ('train',),
}
