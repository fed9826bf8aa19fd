"""The examples in the documentation of the package run, and what pages name has one."""

import doctest
import importlib
from pathlib import Path

import pytest

import het_plugin
from het_plugin import estimators, heads, integrate, models, rows, runs
from het_plugin.commands.probe import probe
from het_plugin.measures import (
  agreement,
  comparison,
  few_shot,
  greedy_ensemble,
  knn,
  rankme,
  uncertainty,
  votes,
)

PACKAGE = Path(het_plugin.__file__).parent
MODULES = sorted(
  '.'.join(('het_plugin', *path.relative_to(PACKAGE).with_suffix('').parts))
  for path in PACKAGE.rglob('*.py')
  if '>>> ' in path.read_text()
)
NAMED = (
  agreement.summarize,
  comparison.paired,
  estimators.DetClassifier,
  estimators.HetClassifier,
  estimators.HetClassifier.calibrate,
  estimators.HetClassifier.covariance,
  estimators.HetClassifier.predict_clean,
  estimators.HetClassifier.predict_set,
  estimators.HetHClassifier,
  estimators.HetXLClassifier,
  estimators.from_head,
  estimators.save,
  estimators.to_checkpoint,
  few_shot,
  greedy_ensemble.greedy_ensemble,
  heads.Det,
  heads.Het,
  heads.HetH,
  heads.HetXL,
  heads.LearnedTemperature,
  heads.class_log_prob,
  heads.contrastive_nll,
  heads.noise_in_directions,
  integrate.GaussianLogits,
  integrate.Integrator,
  integrate.example_keys,
  knn.knn_accuracy,
  models.ClassificationModel,
  probe,
  rankme.rankme,
  rows.Rows,
  rows.read,
  rows.write,
  runs.Run,
  uncertainty.score_examples,
  votes.shares,
)


@pytest.mark.slow
@pytest.mark.parametrize('name', MODULES)
def test_examples_run(name):
  assert not doctest.testmod(importlib.import_module(name)).failed


def test_what_pages_name_has_an_example():
  assert [x.__name__ for x in NAMED if '>>> ' not in x.__doc__] == []
