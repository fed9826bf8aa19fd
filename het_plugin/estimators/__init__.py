"""Heads fitted to saved representations, with scikit-learn's interface."""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:
  from het_plugin.estimators import (
    audit,
    classifier,
    inputs,
    noise_gain,
    placement,
    probe,
    resuming,
    targets,
  )
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

__getattr__, __all__ = faces.on_first_use(__name__)
