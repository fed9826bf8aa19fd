"""Studies: sets of training runs that are compared."""

CONFIGURABLES = {
  'ablation': ('Ablation',),
  'alignment': ('RowSpaceAlignment',),
  'flops': ('Flops',),
  'noise': ('NoiseEffect',),
}
