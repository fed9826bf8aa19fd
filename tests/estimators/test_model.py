"""Where fits start."""

import jax
import numpy as np
import pytest
from scipy import special

from het_plugin.estimators import compilation, directions, objective
from het_plugin.estimators.model import Model


@pytest.mark.parametrize('head', ['het', 'het_h', 'het_xl'])
def test_directions_raise_the_likelihood_most(head):
  """Their second-order gain, by sampling in numpy, is above that of any of 50 random directions."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4000, 5)).astype(np.float32)
  kernel = rng.normal(size=(5, 6))
  shared = 3 * rng.normal(size=(4000, 1)) * np.array([1, -1, 0, 0, 0, 0])
  y = (x @ kernel + shared + rng.gumbel(size=(4000, 6))).argmax(axis=1)
  model = Model(head, 6, noise=(('num_factors', 2),))
  params = model.init(0, 5)
  det = {'head': {'kernel': kernel.astype(np.float32), 'bias': np.zeros(6, np.float32)}}
  y32 = y[:, None].astype(np.int32)
  weight = np.ones(4000)
  rows = objective.make_rows(model, x, np.zeros(5), y32, weight, 1.0, 1.0)
  found = directions.noise_directions(model, det, params, rows, 2)
  _, to_logits, _ = directions.noise_map(model, det, params)

  def gain(direction):
    u = 0.3 * to_logits(direction[:, None] / np.linalg.norm(direction))[:, 0]
    logits = x @ kernel + np.stack([u, -u])[:, None]
    p = special.softmax(logits, axis=-1).mean(axis=0)
    return np.log(p[np.arange(4000), y]).mean()

  others = rng.normal(size=(50, found.shape[1])).astype(np.float32)
  assert gain(found[0]) > max(map(gain, others))


def test_programs_have_a_level_of_their_own_unless_xla_flags_has_one(monkeypatch):
  given = []
  monkeypatch.setattr(jax, 'jit', lambda function, **settings: given.append(settings) or function)
  for flags in (f'--{compilation.LEVEL}=0', ''):
    monkeypatch.setenv('XLA_FLAGS', flags)
    assert compilation.jit(lambda x: x + 1)(1) == 2
  assert given == [{'compiler_options': None}, {'compiler_options': {compilation.LEVEL: 2}}]
