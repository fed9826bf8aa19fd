"""Heads fitted to saved representations, with scikit-learn's interface."""

from het_plugin.estimators.heads import (
  DetClassifier,
  HetClassifier,
  HetHClassifier,
  HetXLClassifier,
)

__all__ = ['DetClassifier', 'HetClassifier', 'HetHClassifier', 'HetXLClassifier']
