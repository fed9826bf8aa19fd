"""Heads fitted to saved representations, with scikit-learn's interface."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from het_plugin.estimators import (
    audit,
    classifier,
    inputs,
    noise_gain,
    placement,
    probe,
    resuming,
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
