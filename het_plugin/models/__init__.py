"""Models with the t5x interface: backbones, a head, and their metrics."""

from het_plugin.models.classification import ClassificationModel, ClassificationModule, ParamCounts
from het_plugin.models.contrastive import ContrastiveModel, ContrastiveModule
from het_plugin.models.metrics import ExpectedCalibrationError

CONFIGURABLES = {
  'classification': ('ClassificationModel',),
  'contrastive': ('ContrastiveModel',),
}
# Settings that may change between two starts of a run without changing its results
# (config/changes.py).
SAME_RESULTS = ('*.eval_integrator', '*.eval_seed')

__all__ = [
  'ClassificationModel',
  'ClassificationModule',
  'ContrastiveModel',
  'ContrastiveModule',
  'ExpectedCalibrationError',
  'ParamCounts',
]
