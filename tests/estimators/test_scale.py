"""Data beyond the memory, meshes, and features in files."""

import subprocess
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from sklearn.exceptions import ConvergenceWarning

from het_plugin.estimators import DetClassifier, HetXLClassifier

NOISY = {'C': 1.0, 'C_noise': 0.1, 'num_factors': 2, 'num_samples': 2}


@pytest.fixture(scope='module')
def data():
  rng = np.random.default_rng(0)
  scales = np.array([0.01, 0.01, 1, 1, 100, 100])
  x = rng.normal(size=(1500, 6))
  y = (x @ rng.normal(size=(6, 11)) + rng.gumbel(size=(1500, 11))).argmax(axis=1)
  return (scales * (x + 3)).astype(np.float32), y


@pytest.mark.slow
def test_minibatches_stop_early_near_the_optimum_and_read_files(data, tmp_path):
  x, y = data
  exact = DetClassifier(10.0).fit(x, y).nll(x, y).mean()
  streamed = DetClassifier(10.0, solver='adam', max_iter=1000).fit(x, y)
  assert streamed.n_iter_ < 500
  assert streamed.nll(x, y).mean() == pytest.approx(exact, abs=0.01)
  np.save(tmp_path / 'x.npy', x)
  mapped = np.load(tmp_path / 'x.npy', mmap_mode='r')
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', ConvergenceWarning)
    fits = [DetClassifier(10.0, solver='adam', max_iter=3).fit(rows, y) for rows in (x, mapped)]
  of_memory, of_file = (fit.predict_log_proba(x) for fit in fits)
  np.testing.assert_array_equal(of_file, of_memory)
  np.testing.assert_array_equal(fits[1].predict_log_proba(mapped), of_memory)


@pytest.mark.slow
@pytest.mark.parametrize('solver', ['lbfgs', 'adam'])
def test_a_mesh_gives_the_same_fit(data, solver):
  """K = 11 on 4 shards of classes. The fit of HET-XL begins with one of DET."""
  x, y = data
  settings = {**NOISY, 'max_iter': 8, 'tol': 1e-2, 'solver': solver}
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', ConvergenceWarning)
    one = HetXLClassifier(**settings).fit(x, y)
    many = HetXLClassifier(**settings, mesh=(2, 4)).fit(x, y)
  assert many.params_['head']['kernel'].shape[1] == 12
  np.testing.assert_allclose(many.nll(x, y).mean(), one.nll(x, y).mean(), atol=2e-3)
  assert many.predict_proba(x).shape == (1500, 11)


@pytest.mark.slow
def test_thousands_of_classes_on_eight_devices():
  """2,057 classes are 2,064 on 8 shards, and no device has more than its columns of W."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2_057, 16)).astype(np.float32)
  fit = HetXLClassifier(mesh=(1, 8), solver='adam', max_iter=1, **NOISY)
  with pytest.warns(ConvergenceWarning, match='still falls after max_iter=1 epochs'):
    fit.fit(x, np.arange(2_057))
  assert fit.params_['head']['kernel'].shape == (16, 2_064)
  np.testing.assert_allclose(fit.predict_proba(x[:32]).sum(axis=1), 1.0, rtol=1e-4)


PEAK = """
import resource, sys, warnings
import numpy as np
from het_plugin.estimators import DetClassifier
warnings.simplefilter('ignore')
for rows in (80_000, 200_000):
  x = np.load(sys.argv[1], mmap_mode='r')[:rows]
  y = np.arange(len(x)) % 10
  det = DetClassifier(solver='adam', max_iter=1).fit(x, y)
  det.predict(x)
  print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_the_memory_of_a_streamed_fit_does_not_grow_with_n(tmp_path):
  """120,000 rows more are 234 MiB more on disk."""
  path = str(tmp_path / 'x.npy')
  file = np.lib.format.open_memmap(path, 'w+', np.float32, (200_000, 512))
  file.reshape(10, 20_000, 512)[:] = np.random.default_rng(0).normal(size=(20_000, 512))
  del file
  command = [sys.executable, '-c', PEAK, path]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  small, large = map(int, done.stdout.split())
  assert large - small < 75, (small, large)


def test_features_in_files_and_of_two_bytes(data, tmp_path):
  x, y = data
  x = (x[:100] / 100).astype(jnp.bfloat16)
  y = (y[:100] % 4).astype(np.int32)
  path = str(tmp_path / 'x.safetensors')
  safetensors.numpy.save_file({'features': x, 'label': y}, path)
  expected = DetClassifier().fit(x.astype(np.float32), y).predict_log_proba(x)
  from_file = DetClassifier().fit(path)
  np.testing.assert_array_equal(from_file.predict_log_proba(path), expected)
  assert from_file.score(path, y) == (expected.argmax(axis=1) == y).mean()
  with safetensors.safe_open(path, framework='flax') as handle:
    np.testing.assert_array_equal(DetClassifier().fit(handle).predict_log_proba(x), expected)
  weighted = str(tmp_path / 'weighted.safetensors')
  weight = np.ones(len(y), np.float32)
  safetensors.numpy.save_file({'features': x, 'label': y, 'label_weight': weight}, weighted)
  with (
    safetensors.safe_open(weighted, framework='flax') as handle,
    pytest.raises(ValueError, match='the open file has label_weight: give its path'),
  ):
    DetClassifier().fit(handle)
  np.testing.assert_array_equal(
    DetClassifier().fit(jnp.asarray(x), y).predict_log_proba(x), expected
  )


def test_changes_of_a_copy_on_write_file_are_kept(data, tmp_path):
  x, y = (rows[:60] for rows in data)
  np.save(tmp_path / 'x.npy', x)
  mapped = np.load(tmp_path / 'x.npy', mmap_mode='c')
  mapped /= 2
  det = DetClassifier(solver='adam', max_iter=1)
  with pytest.warns(ConvergenceWarning):
    np.testing.assert_array_equal(det.fit(mapped, y).predict(mapped), det.predict(x / 2))
  np.testing.assert_array_equal(mapped, x / 2)


@pytest.mark.parametrize('solver', ['lbfgs', 'adam'])
def test_wrong_rows_are_one_sentence(data, solver, tmp_path):
  x, y = (rows[:60].copy() for rows in data)
  det = DetClassifier(solver=solver)
  with pytest.raises(ValueError, match=r'y has shape \(59,\); it must be \[60\]'):
    det.fit(x, y[1:])
  with pytest.raises(ValueError, match='y has one class only, 3'):
    det.fit(x, np.full(60, 3))
  with pytest.raises(ValueError, match='does not exist'):
    det.fit(str(tmp_path / 'none.npz'))
  x[7, 2] = np.nan
  with pytest.raises(ValueError, match='Input X contains NaN or infinity.* row'):
    det.fit(x, y)
  with pytest.raises(ValueError, match=r'X has shape \(60,\), and must be \[N, D\]'):
    det.fit(x[:, 0], y)


def test_more_classes_than_rows_is_a_warning(data):
  x, _ = data
  with pytest.warns(UserWarning, match='y has K=11 classes and X has N=5 rows'):
    DetClassifier(max_iter=30).fit(x[:5], np.full((5, 11), 1 / 11))
