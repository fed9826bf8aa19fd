"""Heads fitted to saved representations, with scikit-learn's interface."""

from het_plugin.estimators.files import from_head, head_params, load, save
from het_plugin.estimators.heads import (
  DetClassifier,
  HetClassifier,
  HetHClassifier,
  HetXLClassifier,
)

__all__ = [
  'DetClassifier',
  'HetClassifier',
  'HetHClassifier',
  'HetXLClassifier',
  'from_head',
  'head_params',
  'load',
  'save',
]
