"""Studies: a folder per question, with what answers it and the numbers that it gave.

They use het_plugin as its users do, run from a checkout, and are not in the wheel. A gin file
beside a study's README is an ablation (`python -m studies.ablate`).
"""

# In gin these have the names of their modules.
CONFIGURABLES = {
  'ablation': ('Ablation',),
  'analyses': ('ExampleNLL', 'NoiseEffect', 'RowSpaceAlignment'),
  'flops': ('Flops', 'linear_classifier'),
}
