"""Studies: sets of training runs that are compared."""

CONFIGURABLES = {
  'ablation': ('Ablation',),
  'analyses': ('NoiseEffect', 'RowSpaceAlignment'),
  'flops': ('Flops',),
}
