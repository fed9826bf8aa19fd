"""Heads fitted to saved representations, with scikit-learn's interface."""

from het_plugin.estimators.files import from_head, from_run, head_params, load, save, to_checkpoint
from het_plugin.estimators.heads import (
  CLASSIFIERS,
  DetClassifier,
  HetClassifier,
  HetHClassifier,
  HetXLClassifier,
)

__all__ = [
  'CLASSIFIERS',
  'DetClassifier',
  'HetClassifier',
  'HetHClassifier',
  'HetXLClassifier',
  'from_head',
  'from_run',
  'head_params',
  'load',
  'save',
  'to_checkpoint',
]
