"""The examples in the documentation of the estimators run."""

import doctest
import importlib
import pkgutil

import pytest

from het_plugin import estimators

MODULES = [
  f'het_plugin.estimators.{module.name}' for module in pkgutil.iter_modules(estimators.__path__)
]


@pytest.mark.parametrize('name', [*MODULES, 'het_plugin.heads.covariance'])
def test_examples_run(name):
  assert not doctest.testmod(importlib.import_module(name)).failed


def test_what_pages_name_has_an_example():
  named = (
    estimators.DetClassifier,
    estimators.HetClassifier,
    estimators.HetHClassifier,
    estimators.HetXLClassifier,
    estimators.HetClassifier.predict_clean,
    estimators.HetClassifier.calibrate,
    estimators.HetClassifier.predict_set,
    estimators.HetClassifier.covariance,
    estimators.save,
    estimators.from_head,
    estimators.to_checkpoint,
    importlib.import_module('het_plugin.estimators.probe').probe,
  )
  assert all('>>> ' in x.__doc__ for x in named)
