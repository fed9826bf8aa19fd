"""What a fitted estimator gives beside predictions: covariance, calibration, sets, files."""

import dataclasses
import json

import jax
import numpy as np
import pyarrow as pa
import pytest
import safetensors
import safetensors.numpy
from flax import traverse_util
from pyarrow import csv
from scipy import special
from sklearn.pipeline import make_pipeline

from het_plugin import estimators, heads
from het_plugin.estimators import DetClassifier, HetClassifier, HetHClassifier, HetXLClassifier


@pytest.fixture(scope='module')
def data():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(900, 5)).astype(np.float32)
  u = 2 * x @ rng.normal(size=(5, 4)) + rng.gumbel(size=(900, 4))
  u[:, :2] += 3 * rng.normal(size=(900, 1)) * np.array([1, -1])  # classes a and b are confused
  return x, np.array(['a', 'b', 'c', 'd'])[u.argmax(axis=1)]


# Heads whose fit is not what a test is about: on 500 rows as that of `het`, which shares programs.
FAST = {'num_samples': 2, 'max_iter': 20, 'tol': 0.1}


@pytest.fixture(scope='module')
def het(data):
  x, y = data
  settings = {'C_noise': 0.03, 'num_factors': 2, 'max_iter': 100, 'tol': 1e-3}
  return HetClassifier(**settings).fit(x[:500], y[:500])


@pytest.mark.slow
def test_covariance_is_that_of_the_samples(data, het):
  x, y = data
  covariance = het.covariance(x[:3])
  assert covariance.shape == (3, 4, 4)
  np.testing.assert_allclose(covariance, covariance.swapaxes(1, 2))
  np.testing.assert_allclose(het.covariance(x[:3], ['c', 'a'])[:, 0, 1], covariance[:, 2, 0])
  # Monte Carlo in numpy: the prediction is the mean softmax of such logits.
  params = het.params_['head']
  mean = (x[:3] - het.mean_) @ params['kernel'] + params['bias']
  rng = np.random.default_rng(0)
  for row in range(3):
    u = rng.multivariate_normal(mean[row], covariance[row], size=200_000, check_valid='ignore')
    p = special.softmax(u, axis=1).mean(axis=0)
    np.testing.assert_allclose(het.predict_proba(x[row : row + 1])[0], p, atol=0.01)
  het.classes_ = het.classes_.astype(object)  # as a fit to strings of pandas gives
  assert HetClassifier(C_noise=0).fit(x[:500], y[:500]).correlated_classes(x) == []
  pairs = het.correlated_classes(x)
  assert len(pairs) == 6 and all(-1.001 <= pair[2] <= 1.001 for pair in pairs)
  total, aleatoric = het.entropy(x)
  p = het.predict_proba(x)
  np.testing.assert_allclose(total, special.entr(p).sum(axis=1), atol=1e-4)
  assert (aleatoric <= total).all() and (aleatoric < total).any()


@pytest.mark.slow
def test_clean_predictions_are_those_of_the_location(data, het):
  x, y = data
  head = het.params_['head']
  location = ((x - het.mean_) @ head['kernel'] + head['bias'])[:, :4]
  clean = het.predict_clean_proba(x)
  np.testing.assert_allclose(clean, special.softmax(location, axis=1), rtol=1e-4, atol=1e-6)
  np.testing.assert_array_equal(het.predict_clean(x), np.array(list('abcd'))[clean.argmax(axis=1)])
  xl = HetXLClassifier(C_noise=1.0, num_factors=2, **FAST).fit(x[:500], y[:500])
  location = (x - xl.mean_) @ xl.params_['head']['kernel'] + xl.params_['head']['bias']
  expected = special.softmax(location[:, :4], axis=1)
  np.testing.assert_allclose(xl.predict_clean_proba(x), expected, rtol=1e-4, atol=1e-6)
  on = np.stack([x[:, 0] > 0, y == 'a'], axis=1).astype(int)
  certain = HetClassifier(1e6, C_noise=1.0, num_factors=1, **FAST).fit(x[:500], on[:500])
  np.testing.assert_array_equal(certain.predict_clean(x), certain.predict_clean_proba(x) > 0.5)
  assert np.isfinite(certain.entropy(100 * x)).all()  # of classes that are certain


@pytest.mark.parametrize('method', ['temperature', 'vector'])
def test_calibration_lowers_the_nll_of_an_overfitted_head(data, method):
  x, y = data
  det = DetClassifier(1e6, max_iter=60).fit(x[:30], y[:30])
  before = det.nll(x[600:], y[600:]).mean()
  det.calibrate(x[30:600], y[30:600], method)
  assert det.nll(x[600:], y[600:]).mean() < before - 0.1
  np.testing.assert_allclose(det.predict_proba(x).sum(axis=1), 1.0, rtol=1e-5)


def test_a_calibration_by_few_rows_warns(data):
  x, y = data
  det = DetClassifier().fit(x[:200], y[:200])
  for method, few in (('temperature', 2), ('vector', 18)):
    with pytest.warns(UserWarning, match=f'half of the {few} rows fit the {method}.*give 20 rows'):
      det.calibrate(x[:few], y[:few], method)


@pytest.mark.slow
def test_sets_cover_the_label(data):
  x, y = data
  det = DetClassifier().fit(x[:200], y[:200])
  det.calibrate(x[200:550], y[200:550], 'none')
  column = np.searchsorted(det.classes_, y)
  for alpha in (0.05, 0.2):
    sets = det.predict_set(x[550:], alpha)
    covered = sets[np.arange(350), column[550:]].mean()
    assert abs(covered - (1 - alpha)) < 0.07
  with pytest.raises(ValueError, match='needs at least 999 rows'):
    det.predict_set(x, 0.001)
  # Rows of equal scores are in or out together: three different rows, of which two are one class.
  same = np.repeat(np.eye(3), 100, axis=0)
  labels = np.repeat([0, 1, 1], 100)
  labels[::10] = 1 - labels[::10]
  sets = estimators.DetClassifier().fit(same, labels).calibrate(same, labels, 'none')
  for alpha in (0.05, 0.1, 0.2):
    assert sets.predict_set(same, alpha)[np.arange(300), labels].mean() >= 1 - alpha


def test_files_give_the_same_predictions(data, tmp_path):
  x, y = data
  # As few rows as elsewhere in this file: the fits of DET share programs.
  het = HetClassifier(C_noise=0.03, num_factors=2, **FAST).fit(x[:30], y[:30])
  path = str(tmp_path / 'new' / 'het.safetensors')
  het.calibrate(x[500:700], y[500:700], 'vector')
  calibrated = het.predict_proba(x)
  with pytest.raises(ValueError, match="method='scaling' must be one of 'temperature', "):
    het.calibrate(x[500:700], y[500:700], 'scaling')
  np.testing.assert_array_equal(het.predict_proba(x), calibrated)  # the first one is kept
  het.set_params(num_factors=np.int64(2))  # as GridSearchCV over np.arange does
  het.noise_nll_ = {0.0: 0.7, np.float64(0.03): np.float32(0.5)}  # as C_noise='auto' gives
  estimators.save(het, path)
  loaded = estimators.load(path)
  for write in (estimators.save, estimators.export, estimators.to_checkpoint):
    with pytest.raises(ValueError, match='got Pipeline: give the last step'):
      write(make_pipeline(het), path)
  np.testing.assert_array_equal(loaded.predict_proba(x), het.predict_proba(x))
  np.testing.assert_array_equal(loaded.predict_set(x, 0.2), het.predict_set(x, 0.2))
  assert loaded.get_params() == het.get_params() and list(loaded.classes_) == list('abcd')
  assert (loaded.noise_nll_, loaded.tau_grid_nll_) == (het.noise_nll_, None)
  (tmp_path / 'bad.safetensors').write_bytes(b'no such file')
  with pytest.raises(ValueError, match='holds no estimator'):
    estimators.load(str(tmp_path / 'bad.safetensors'))


def test_a_file_keeps_the_names_of_features_and_classes(data, tmp_path):
  x = data[0][:9]
  path = str(tmp_path / 'det.safetensors')
  head = heads.Det(4)
  opened = estimators.from_head(head, head.init(jax.random.key(0), x)['params'])
  estimators.save(opened, path)
  assert not hasattr(estimators.load(path), 'feature_names_in_')
  opened.feature_names_in_ = np.array([*'abcde'], object)  # as of a fit to a data frame
  estimators.save(opened, path)
  assert estimators.load(path).feature_names_in_.tolist() == [*'abcde']
  opened.classes_ = np.array([*'abcd'], np.dtypes.StringDType())
  estimators.save(opened, path)
  for dtype in ('M8[Y]', 'S1'):
    opened.classes_ = np.arange(4).astype(dtype)
    for write in (estimators.save, estimators.export):
      with pytest.raises(ValueError, match='fit to numbers or strings'):
        write(opened, path)
  assert list(estimators.load(path).classes_) == [*'abcd']


def test_columns_of_files_and_frames_are_those_of_the_fit(data, tmp_path):
  x, y = data[0][:30], data[1][:30]
  names = [*'abcde']
  table = pa.table({'label': y} | dict(zip(names, x.T.astype(np.float64), strict=True)))
  train, moved, saved = (str(tmp_path / name) for name in ('a.csv', 'b.csv', 'a.safetensors'))
  csv.write_csv(table, train)
  csv.write_csv(table.select(['label', *'bacde']), moved)
  det = DetClassifier(max_iter=3).fit(train)
  estimators.save(det, saved)
  opened = estimators.load(saved)
  np.testing.assert_array_equal(opened.predict_proba(train), det.predict_proba(train))
  frame = table.select(names)  # which scikit-learn takes for a data frame
  of_frame = DetClassifier(max_iter=3).fit(frame, y)
  np.testing.assert_array_equal(of_frame.predict(train), opened.predict(frame))
  for fitted in (opened, of_frame):
    assert fitted.feature_names_in_.tolist() == names
    with pytest.raises(ValueError, match="feature 0 is 'b' in X and 'a' in the fit: both must"):
      fitted.nll(moved)
    with pytest.raises(ValueError, match='Feature names must be in the same order'):
      fitted.predict(frame.select([*'bacde']))
    with pytest.warns(UserWarning, match='X does not have valid feature names'):
      fitted.predict(x)
  assert not hasattr(opened.fit(x, y), 'feature_names_in_')
  opened.predict(moved)


@pytest.mark.slow
def test_damage_of_a_file_is_noticed_or_harmless(data, tmp_path):
  """One flipped bit, at places all over the file: most of a small file is its header."""
  x, y = data
  path = tmp_path / 'head.safetensors'
  fitted = HetXLClassifier(C_noise=1.0, num_factors=2, **FAST).fit(x[:500], y[:500])
  estimators.save(fitted.calibrate(x[:500], y[:500]), str(path))
  whole = path.read_bytes()
  expected = fitted.predict_proba(x[:3])
  rng = np.random.default_rng(0)
  noticed = 0
  for place in rng.choice(len(whole), 400, replace=False):
    damaged = bytearray(whole)
    damaged[place] ^= 1 << rng.integers(8)
    path.write_bytes(damaged)
    try:
      loaded = estimators.load(str(path))
    except ValueError as error:
      assert str(path) in str(error) and '\n' not in str(error)
      noticed += 1
    else:
      np.testing.assert_array_equal(loaded.predict_proba(x[:3]), expected)
  assert noticed > 380
  for length in rng.choice(len(whole), 30, replace=False):
    path.write_bytes(whole[:length])
    with pytest.raises(ValueError, match='head.safetensors'):
      estimators.load(str(path))


def rewritten(path, checksum=True, arrays=None, **changes):
  """Changes the description in the file of an estimator; with a checksum, a right one."""
  with safetensors.safe_open(path, framework='numpy') as file:
    found = {name: file.get_tensor(name) for name in file.keys()} | (arrays or {})
    description = json.loads(file.metadata()['het_plugin.estimator'])
  text = json.dumps(description | changes)
  metadata = {'het_plugin.estimator': text}
  if checksum:
    metadata['het_plugin.sha256'] = estimators.files.checksum(text, found)
  safetensors.numpy.save_file(found, path, metadata=metadata)


def test_sizes_that_a_file_states_are_those_of_its_arrays(data, tmp_path):
  x = data[0]
  head = heads.Det(4)
  path = str(tmp_path / 'head.safetensors')
  fitted = estimators.from_head(head, head.init(jax.random.key(0), x)['params'], [*'abcd'])
  estimators.save(fitted, path)
  rewritten(path, checksum=False)
  with pytest.raises(ValueError, match='head.safetensors holds no .*: it has no checksum'):
    estimators.load(path)
  model = dataclasses.asdict(fitted.model_)
  for changes in (
    {'model': model | {'num_classes': 10**12}},
    {'model': model | {'class_multiple': 10**12}},
    {'model': model | {'hidden_layers': [10**9]}},
    {'model': model | {'head': 'het', 'noise': [['num_factors', 10**9]]}},
    {'classes_dtype': f'<U{10**8}'},
    {'classes': ['a']},
    {'arrays': {'mean': np.zeros(4)}},
  ):
    estimators.save(fitted, path)
    rewritten(path, **changes)
    with pytest.raises(ValueError, match='head.safetensors holds no estimator'):
      estimators.load(path)


@pytest.mark.slow
@pytest.mark.parametrize(
  'head',
  [
    heads.HetXL(
      10, temperature=heads.LearnedTemperature(tau_min=0.1, tau_max=2.0, initial_tau=0.7)
    ),
    heads.Het(10, num_factors=3, parametrization='full'),
    heads.HetH(10, num_factors=3, num_buckets=20, class_multiple=1),
    heads.HetH(10, num_factors=3, num_buckets=5, empty_buckets=False),
  ],
)
def test_a_head_of_a_run_is_saved_with_its_settings(head, tmp_path):
  x = np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)
  params = jax.jit(head.init)(jax.random.key(0), x[:1])['params']
  opened = estimators.from_head(head, params)

  @jax.jit
  def scaled_factors(params):
    logits = head.apply({'params': params}, x)
    return logits.factors() / logits.temperature

  factors = np.asarray(scaled_factors(params))[..., :10]
  covariance = np.einsum('nrk,nrl->nkl', factors, factors)
  np.testing.assert_allclose(opened.covariance(x), covariance, rtol=1e-3, atol=1e-5)
  estimators.save(opened, str(tmp_path / 'head.safetensors'))
  loaded = estimators.load(str(tmp_path / 'head.safetensors'))
  np.testing.assert_array_equal(loaded.predict_proba(x), opened.predict_proba(x))
  assert loaded.temperature_ == opened.temperature_


def test_widths_of_hidden_layers_may_be_an_array(tmp_path):
  head = heads.Det(3)
  x = np.ones((1, 5), np.float32)
  opened = estimators.from_head(head, head.init(jax.random.key(0), x)['params'])
  opened.hidden_layers = np.array([4, 5])
  opened.model_ = dataclasses.replace(opened.model_, hidden_layers=(4, 5))
  assert not hasattr(opened, 'coef_')
  with pytest.raises(ValueError, match=r'hidden_layers=\(4, 5\) cannot be written to a run'):
    estimators.to_checkpoint(opened, str(tmp_path / 'x.npz'), {'backbone/x': x})
  opened = estimators.from_head(head, head.init(jax.random.key(0), x)['params'])
  with pytest.raises(ValueError, match=r"that of a run is runs\.configuration\('runs/det'\)"):
    estimators.to_checkpoint(opened, str(tmp_path / 'x.npz'), 'runs/det')


def test_classes_of_a_run_are_in_its_order_and_as_many():
  head = heads.Det(3)
  x = np.eye(3, dtype=np.float32)
  params = head.init(jax.random.key(0), x)['params'] | {'kernel': 5 * np.eye(3, 128)}
  opened = estimators.from_head(head, params, classes=['dog', 'ant', 'cat'])
  np.testing.assert_array_less(opened.nll(x, ['dog', 'ant', 'cat']), 0.1)
  assert opened.score(x, [2 * ['dog'], 2 * ['ant'], ['cat', 'dog']]) == pytest.approx(5 / 6)
  for wrong in (['dog'], 4 * ['dog']):
    with pytest.raises(ValueError, match='the head has 3 classes'):
      estimators.from_head(head, params, classes=wrong)


@pytest.mark.slow
def test_a_head_of_a_run_is_an_estimator_and_the_way_back(data):
  x, y = data
  head = heads.HetXL(4, temperature=heads.LearnedTemperature(initial_tau=0.7), num_factors=3)
  params = jax.jit(head.init)(jax.random.key(0), x[:1])['params']
  opened = estimators.from_head(head, params, classes=list('abcd'))
  factors = jax.jit(lambda p: head.apply({'params': p}, x[:5]).factors())(params)
  np.testing.assert_allclose(
    opened.covariance(x[:5]),
    np.einsum('nrk,nrl->nkl', *[np.asarray(factors)[..., :4] / 0.7] * 2),
    rtol=1e-4,
    atol=1e-5,
  )
  assert opened.temperature_ == pytest.approx(0.7) and set(opened.predict(x)) <= set('abcd')

  fitted = HetXLClassifier(num_factors=3, C_noise=0.03, **FAST).fit(x[:500] + 3, y[:500])
  own = head.clone(class_multiple=1, temperature=heads.FixedTemperature())
  tree = traverse_util.unflatten_dict(estimators.head_params(fitted), sep='/')
  reopened = estimators.from_head(own, tree['head'], classes=list('abcd'))
  np.testing.assert_allclose(
    reopened.set_params(num_samples=2).covariance(x + 3),
    fitted.covariance(x + 3),
    rtol=2e-3,
    atol=1e-4,
  )


@pytest.mark.slow
def test_het_h_has_parameters_for_the_buckets_that_hold_a_class(data):
  """A run has all buckets; the estimator fits only those that a class is hashed to."""
  x, y = data
  fitted = HetHClassifier(num_factors=2, num_buckets=40, C_noise=0.03, **FAST)
  fitted.fit(x[:500], y[:500])
  tree = traverse_util.unflatten_dict(estimators.head_params(fitted), sep='/')['head']
  assert tree['covariance']['J'].shape == (2, 40)
  assert fitted.params_['head']['covariance']['J'].shape[1] <= 4
  head = heads.HetH(4, num_factors=2, num_buckets=40, class_multiple=1)
  factors = np.asarray(jax.jit(lambda p: head.apply({'params': p}, x[:5]).factors())(tree))
  expected = np.einsum('nrk,nrl->nkl', factors, factors)
  np.testing.assert_allclose(fitted.covariance(x[:5]), expected, rtol=1e-3, atol=1e-5)
  opened = estimators.from_head(head, tree)
  np.testing.assert_allclose(opened.covariance(x[:5]), expected, rtol=1e-3, atol=1e-5)
