"""White coordinates: there and back, unit curvature, and features of any scale."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.estimators import DetClassifier, HetXLClassifier, lbfgs, objective
from het_plugin.estimators.model import Model
from het_plugin.estimators.whitening import unwhiten, whiten, whitening_of


def problem(model, num_rows=2000, dim=4):
  """Rows of the labels of a linear map, and parameters near their optimum."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(num_rows, dim)) * [0.01, 1, 1, 100]
  kernel = rng.normal(size=(dim, model.num_classes)) / np.array([[0.01], [1], [1], [100]])
  y = (x @ kernel + rng.gumbel(size=(num_rows, model.num_classes))).argmax(axis=1)
  target = y[:, None].astype(np.int32)
  weight = np.ones(num_rows)
  rows = objective.make_rows(model, x, np.zeros(dim), target, weight, 1.0, 1.0)
  params = model.init(0, dim)
  params['head']['kernel'] = kernel.astype(np.float32)
  return rows, params


@pytest.mark.parametrize(
  'head', ['het', *(pytest.param(x, marks=pytest.mark.slow) for x in ('het_h', 'het_xl'))]
)
def test_there_and_back(head):
  model = Model(head, 5, noise=(('num_factors', 2),), num_samples=2)
  rows, params = problem(model)
  whitening = whitening_of(model, params, rows)
  again = unwhiten(model, whiten(model, params, whitening), whitening)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3), again, params)


def test_the_curvature_is_near_one():
  model = Model('det', 5)
  rows, params = problem(model)
  whitening = whitening_of(model, params, rows)
  theta, unravel = jax.flatten_util.ravel_pytree(whiten(model, params, whitening))

  def gradient(theta):
    theta = unravel(theta)
    found = lbfgs._evaluate(model, theta, theta, 0.0, rows, whitening)[2]
    return jax.flatten_util.ravel_pytree(found)[0]

  step = 1e-2 * jnp.eye(len(theta))
  hessian = jax.lax.map(lambda d: (gradient(theta + d) - gradient(theta - d)) / 2e-2, step)
  values = np.linalg.eigvalsh((hessian + hessian.T) / 2)
  values = values[5:]  # a softmax does not change if all logits move together
  assert 0.3 < values.min() and values.max() < 6, values


@pytest.mark.slow
def test_a_fit_multiplies_in_float32(monkeypatch):
  # A GPU or TPU would take fewer bits, and the gradient would not fall to `tol`.
  evaluate = lbfgs._evaluate
  programs = set()
  traced = jax.jit(evaluate.__wrapped__, static_argnums=0)

  def spy(*arguments, **named):
    programs.add(traced.lower(*arguments, **named).as_text())
    return evaluate(*arguments, **named)

  monkeypatch.setattr(lbfgs, '_evaluate', spy)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(60, 3))
  y = rng.integers(4, size=60)
  HetXLClassifier(num_factors=1, num_samples=8, max_iter=2).fit(x, y)
  assert len(programs) == 2  # DET's and HET-XL's
  for program in programs:
    assert 'precision = [HIGHEST, HIGHEST]' in program
    assert 'precision = [DEFAULT, DEFAULT]' not in program


def test_badly_scaled_features_and_rare_classes_cost_few_iterations():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3000, 8))
  logits = 2 * x @ rng.normal(size=(8, 12)) - 0.5 * np.arange(12)
  y = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
  fit = DetClassifier(1000.0).fit(x * 10.0 ** np.arange(-4, 4), y)
  assert fit.gradient_ <= 1e-4 and fit.n_iter_ < 60
