"""Heads fitted to saved representations, with scikit-learn's interface."""

from het_plugin.estimators.classifiers import (
  CLASSIFIERS,
  DetClassifier,
  HetClassifier,
  HetHClassifier,
  HetXLClassifier,
)
from het_plugin.estimators.files import from_head, head_params, load, save, to_checkpoint
from het_plugin.estimators.out_of_fold import cross_val_predict
from het_plugin.estimators.serving import export

__all__ = [
  'CLASSIFIERS',
  'DetClassifier',
  'HetClassifier',
  'HetHClassifier',
  'HetXLClassifier',
  'cross_val_predict',
  'export',
  'from_head',
  'head_params',
  'load',
  'save',
  'to_checkpoint',
]
