"""`noise_test`: its first order against quadrature, and its gains on labels of known origin."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.commands import noise_test as noise_test_command
from het_plugin.estimators import noise_gain
from het_plugin.estimators.first_order import FirstOrder
from het_plugin.estimators.noise_gain import HIDDEN, noise_test

D = 5
K = 6


@pytest.mark.parametrize('link', ['softmax', 'sigmoid'])
def test_the_first_order_is_that_of_the_integral(link):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(7, D)), jnp.float32)
  w = rng.normal(size=(D, K))
  b = rng.normal(size=K)
  u = rng.normal(size=(K, 1))
  v = np.float64(rng.normal(size=(D, 1)))
  nodes, weights = np.polynomial.hermite_e.hermegauss(60)
  weights = weights / weights.sum()
  mu = np.float64(x) @ w + b
  link_of = {'softmax': lambda v: np.exp(v) / np.exp(v).sum(-1, keepdims=True)}
  link_of['sigmoid'] = lambda v: 1 / (1 + np.exp(-v))
  model = FirstOrder('det', K, link, num_samples=1)
  nll_of = jax.jit(model.nll)

  def errors(size):
    """Largest change of the log-probability by noise, and by how much the model misses it."""
    params = {
      'head': {'kernel': w, 'bias': b},
      'fixed': {'directions': u},
      'size': {'v_kernel': size * v, 'v_bias': size * np.ones(1)},
    }
    params = jax.tree.map(np.float32, params)
    a = np.float64(size) * (np.float64(x) @ v + 1.0)  # [B, 1], of either sign: u has both
    exact = np.einsum(
      'z,zbk->bk', weights, link_of[link](mu + nodes[:, None, None] * (a * u[:, 0]))
    )
    if link == 'softmax':
      labels = [np.full((7, 1), k, np.int32) for k in range(K)]
      found = -np.stack([nll_of(params, x, y) for y in labels], axis=1)
    else:
      alone = [np.float32(np.eye(K)[k] * np.ones((7, 1))) for k in range(K)]
      none = nll_of(params, x, np.zeros((7, K), np.float32))
      found = np.stack([none - nll_of(params, x, y) for y in alone], axis=1)  # log-odds
      exact = exact / (1 - exact)
    before = link_of[link](mu)
    before = before / (1 - before) if link == 'sigmoid' else before
    return np.abs(np.log(exact / before)).max(), np.abs(found - np.log(exact)).max()

  large, missed_large = errors(0.2)
  change, missed = errors(0.1)
  assert missed < 0.15 * change and 3.0 < large / change < 5.0
  assert missed < 0.15 * missed_large  # of fourth order in the standard deviation


def labels(kind, n=4000):
  """Of one length, two directions and D = 4 in all tests, which so share programs."""
  rng = np.random.default_rng(1)
  x = rng.normal(size=(n, 4)).astype(np.float32)
  w = 2.0 * rng.normal(size=(4, K))
  u = x @ w
  if kind == 'noise':
    u = u + 2.0 * rng.normal(size=(n, 1)) * (rng.normal(size=4) @ w)  # in the space of W
  if kind == 'curved':
    u = u + 2.0 * (np.square(x) - 1.0) @ rng.normal(size=(4, K))
  return x, (u + rng.gumbel(size=u.shape)).argmax(axis=1)


@pytest.mark.slow
def test_gains_where_there_is_noise_and_none_where_there_is_not():
  settings = {'heads': ['het', 'het_xl'], 'num_factors': 2, 'progress': False, 'C': 10.0}
  of_noise = {t.name: t.row() for t in noise_test(*labels('noise'), **settings).tested}
  for head in ('het', 'het_xl'):
    assert of_noise[head]['gain'] > 3 * of_noise[head]['stderr'] > 0
    assert of_noise[head]['constant'] > 0 and of_noise[head]['price'] > 0
  found = noise_test(*labels('none'), **settings)
  assert found.gradient <= found.tol and found.num_rows == 4000
  for tested in found.tested:
    assert abs(tested.gain.mean()) < 0.002
  curved = {t.name: t.gain.mean() for t in noise_test(*labels('curved'), **settings).tested}
  assert curved[HIDDEN] > 0.05 and curved[HIDDEN] > 2 * max(curved['het'], curved['het_xl'])


@pytest.mark.slow
def test_several_labels_and_a_given_location():
  x, y = labels('noise')
  settings = {'heads': ['het_xl'], 'num_factors': 2, 'progress': False}
  shares = 0.9 * np.eye(K)[y] + 0.1 / K
  far = {'tol': 0.1, **settings}  # from the optimum, which is not what these two are about
  assert noise_test(x.tolist(), shares, **far).nll > 0
  on = np.eye(K, dtype=int)[y]
  assert noise_test(x, on, **far).tested[0].gain.shape == (4000,)
  # DET's own optimum, given, is refitted by little.
  from het_plugin.estimators import DetClassifier

  det = DetClassifier(C=1.0).fit(x, y)
  given = det.coef_.T, det.intercept_
  twice = np.random.default_rng(0).random(len(y)) < 0.5
  votes = np.stack([y, np.where(twice, y, -1)], axis=1)
  found = noise_test(x, votes, target='votes', location=given, C=1e-4, **settings)
  assert found.refit is not None and abs(found.refit.mean()) < 0.01
  assert found.nll == pytest.approx(det.nll(x, y).mean(), abs=0.01)


def test_rows_with_a_vote_that_no_other_fold_has_are_left_out():
  x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
  votes = np.stack([x[:, 0] > 0, x[:, 1] > 0], axis=1).astype(int)
  votes[5, 1] = 2
  settings = {'heads': ['het'], 'num_factors': 1, 'max_iter': 3, 'progress': False}
  found = noise_test(x, votes, target='votes', **settings)
  assert (found.num_rows, found.left_out) == (39, 1) and found.nll < 2


def test_few_rows_are_said_to_be_few():
  gain = np.zeros(8)
  tested = [noise_gain.Tested(name, gain, gain, gain, ['none'], 9.0) for name in ('het', HIDDEN)]
  few = noise_gain.Result(0.9, None, tested, 8, 1, 0.0, 1e-3, 1.0)
  notes = noise_test_command.make_report({'rows': few}, 'a.npz').notes
  assert 'rows: 8 rows are too few: gains and errors of them say nothing.' in notes
  assert 'rows: left out, because no other fold has their class: 1.' in notes
  enough = dataclasses.replace(few, num_rows=100, left_out=0)
  assert len(noise_test_command.make_report({'rows': enough}, 'a.npz').notes) == len(notes) - 2


@pytest.mark.slow
def test_the_main_and_its_errors(tmp_path, run_main):
  x, y = labels('noise')
  np.savez(tmp_path / 'rows.npz', features=x, label=y)
  train = f'--train={tmp_path}/rows.npz'
  flags = '--folds=2', '--num_factors=2', f'--json={tmp_path}/out.json'
  printed = run_main(noise_test_command, train, *flags)
  rows = json.loads((tmp_path / 'out.json').read_text())
  assert [row['head'] for row in rows] == ['het', 'het_h', 'het_xl', HIDDEN]
  gain = next(row['gain'] for row in rows if row['head'] == 'het_xl')
  assert f'HET-XL would gain {gain:.4f} ± ' in printed
  for flag, message in {
    '--split=test': '--split has no effect on --train',
    '--heads=det': "--heads=det must be one of 'het', 'het_h', 'het_xl'",
  }.items():
    assert message in run_main(noise_test_command, train, flag, code=2)
  for changes, message in (({'heads': ['det']}, "'det'"), ({'folds': 4001}, 'folds=4001')):
    with pytest.raises(ValueError, match=message):
      noise_test(x, y, progress=False, **changes)
  with pytest.raises(ValueError, match='NaN'):
    noise_test(np.where(x > 3, np.nan, x), y, progress=False)
  with pytest.raises(ValueError, match=r'x has shape \(4000,\)'):
    noise_test(x[:, 0], y, progress=False)
  with pytest.raises(ValueError, match='1 class'):
    noise_test(x, np.zeros(4000, int), progress=False)
