"""Studies: sets of training runs that are compared."""

CONFIGURABLES = {
  'ablation': ('Ablation',),
  'analyses': ('ExampleNLL', 'NoiseEffect', 'RowSpaceAlignment'),
  'flops': ('Flops',),
}
