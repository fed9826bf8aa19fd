"""Heads fitted to saved representations, with scikit-learn's interface."""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:
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

_MODULES = {
  'classifiers': (
    'CLASSIFIERS',
    'DetClassifier',
    'HetClassifier',
    'HetHClassifier',
    'HetXLClassifier',
  ),
  'files': ('from_head', 'head_params', 'load', 'save', 'to_checkpoint'),
  'out_of_fold': ('cross_val_predict',),
  'serving': ('export',),
}

__all__ = [name for names in _MODULES.values() for name in names]
__getattr__ = faces.on_first_use(__name__, _MODULES)
