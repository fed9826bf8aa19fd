"""The t5x model surface around a backbone, a head and their metrics."""

from het_plugin.models.classification import ClassificationModel, ClassificationModule, ParamCounts
from het_plugin.models.metrics import ExpectedCalibrationError

__all__ = [
  'ClassificationModel',
  'ClassificationModule',
  'ExpectedCalibrationError',
  'ParamCounts',
]
