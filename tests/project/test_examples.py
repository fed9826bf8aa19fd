"""examples/: each file runs as it stands, and does what its first lines say. Those for big_vision
and Kauldron run in tests/hosts.
"""

import importlib.util
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples'


def load(name):
  spec = importlib.util.spec_from_file_location(name, EXAMPLES / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.slow
@pytest.mark.parametrize('name', ['linen_trainer', 'nnx_trainer'])
def test_trainers_learn_the_digits(name, capsys):
  accuracy = load(name).main()
  assert accuracy > 0.95
  said = capsys.readouterr().out.splitlines()
  assert said[-1] == f'accuracy {accuracy:.3f} on 500 held-out digits'
  if name == 'nnx_trainer':
    assert said[0] == "mesh: {'data': 4, 'model': 2}" and jax.device_count() == 8


def test_the_temperature_does_not_decay():
  linen = load('linen_trainer')
  nnx = load('nnx_trainer')
  params = {'head': {'kernel': 1.0, 'temperature': {'t': 0.0}}}
  expected = {'head': {'kernel': True, 'temperature': {'t': False}}}
  assert linen.is_decayed(params) == expected
  assert not nnx.is_decayed(('classifier', 'head', 'temperature', 't'), None)
  assert nnx.is_decayed(('classifier', 'head', 'kernel'), None)


@pytest.mark.slow
def test_noise_finds_the_truth_behind_wrong_labels():
  found = load('saved_features').main()
  det_loss, det, det_clean = found['Det']
  loss, predicted, clean = found['HetXL']
  assert loss < det_loss - 0.05 and clean > det + 0.04
  assert det == det_clean and abs(clean - predicted) < 0.03
