"""The classifiers that the benchmarks of the trainer train."""

from het_plugin.backbones import vit
from het_plugin.heads import HetXL, LearnedTemperature
from het_plugin.integrate import Integrator
from het_plugin.models import ClassificationModel
from het_plugin.training import optimizers

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
