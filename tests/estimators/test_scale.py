"""Data beyond the memory, meshes, and features in files."""

import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from sklearn.exceptions import ConvergenceWarning

from het_plugin.estimators import (
  DetClassifier,
  HetXLClassifier,
  inputs,
  lbfgs,
  objective,
  placement,
  stream,
  whitening,
)
from het_plugin.estimators.model import Model
from het_plugin.rows import Rows, read, write
from het_plugin.system import stopping

NOISY = {'C': 1.0, 'C_noise': 0.1, 'num_factors': 2, 'num_samples': 2}


@pytest.fixture(scope='module')
def data():
  rng = np.random.default_rng(0)
  scales = np.array([0.01, 0.01, 1, 1, 100, 100])
  x = rng.normal(size=(1500, 6))
  y = (x @ rng.normal(size=(6, 11)) + rng.gumbel(size=(1500, 11))).argmax(axis=1)
  return (scales * (x + 3)).astype(np.float32), y


@pytest.fixture
def small_parts(monkeypatch):
  """Chunks, runs and parts in memory so small that a few rows have several."""
  monkeypatch.setattr(stream, 'CHUNK_BYTES', 2**12)
  monkeypatch.setattr(stream, 'RUN_ROWS', 16)
  monkeypatch.setattr(stream, 'HELD_BYTES', 2**14)
  monkeypatch.setattr(objective, 'CACHE_BYTES', 2**14)


def mapped(x, folder):
  np.save(folder / 'x.npy', x)
  return np.load(folder / 'x.npy', mmap_mode='r')


def test_rows_on_disk_have_the_fit_of_memory(data, tmp_path, small_parts, monkeypatch):
  x, y = data
  weight = np.where(np.arange(len(x)) % 5, 1.0 + np.arange(len(x)) % 2, 0.0)
  of_memory = DetClassifier(10.0).fit(x, y, weight)
  for number, start in enumerate((0, 700)):
    part = slice(start, start + 700 + 100 * number)
    index = np.arange(len(x))[part]
    rows_of = Rows({'features': x[part]}, y[part, None].astype(np.int32), index)
    write(tmp_path / f'train-{number}.safetensors', rows_of)
  files = str(tmp_path / 'train-*.safetensors')
  titles = []
  progress_of = lbfgs.progress_of

  def titled(progress, *others):
    titles.append(progress)
    return progress_of(progress, *others)

  monkeypatch.setattr(lbfgs, 'progress_of', titled)
  det = DetClassifier(10.0, solver='streamed', progress='fit 1')
  of_file = det.fit(files, sample_weight=weight)
  assert titles[0] == 'fit 1, 128 of 1,200 rows from disk'
  assert titles[-1] == 'fit 1, 1,200 of 1,200 rows from disk' and len(titles) == 4
  assert of_file.objective_ == pytest.approx(of_memory.objective_, abs=2e-5)
  np.testing.assert_array_equal(of_file.mean_, of_memory.mean_)
  np.testing.assert_allclose(of_file.nll(files).mean(), of_memory.nll(x, y).mean(), atol=2e-3)


@pytest.mark.parametrize(
  'model',
  [
    Model('det', 11),  # below, 64 samples have a rotation for each row
    pytest.param(Model('het_xl', 11, noise=(('num_factors', 2),)), marks=pytest.mark.slow),
  ],
)
def test_the_objective_of_a_stream_has_the_digits_of_memory(model, data, small_parts):
  x, y = data
  labels = y[:, None].astype(np.int32), np.ones(len(x))
  far = inputs.Far(np.zeros(0, int), np.array([7]), np.full((1, 6), 1e3))
  moved = x.copy()
  moved[7] = 1e3
  params = model.init(0, 6)
  with placement.on(None):
    both = (
      objective.make_rows(model, moved, x.mean(axis=0), *labels, 1.0, 0.1),
      stream.make_stream(model, x, x.mean(axis=0), *labels, far, 1.0, 0.1, None),
    )
    found = []
    for of, evaluate in zip(both, (lbfgs._evaluate, lbfgs._evaluate_stream), strict=True):
      coordinates = whitening.whitening_of(model, params, of)
      theta = whitening.whiten(model, params, coordinates)
      drawn = of.drawn(model, params)
      found.append(evaluate(model, theta, theta, 0.1, drawn, coordinates))
  assert float(found[0][1]) == pytest.approx(float(found[1][1]), rel=1e-6)
  for a, b in zip(*(jax.tree.leaves(x[2]) for x in found), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


def test_a_file_that_changes_ends_the_fit_and_a_signal_keeps_the_best(
  data, tmp_path, small_parts, monkeypatch
):
  x, y = data
  rows = mapped(x, tmp_path)
  read = stream.Stream._read
  reads = []

  def changed(self, *places):
    reads.append(places)
    if len(reads) == 9:
      os.utime(tmp_path / 'x.npy', (0, 0))
    return read(self, *places)

  det = DetClassifier(solver='streamed')
  with monkeypatch.context() as patched:
    patched.setattr(stream.Stream, '_read', changed)
    with pytest.raises(ValueError, match=r'x\.npy has changed during the fit'):
      det.fit(rows, y)
  best = det.fit(rows, y).objective_
  passes = iter(range(1000))
  monkeypatch.setattr(stopping, 'agreed', lambda: next(passes) > 120)
  with pytest.warns(ConvergenceWarning, match='has not converged: .* it was stopped'):
    det.fit(rows, y)
  assert 0 < det.objective_ - best < 0.2 and det.gap_ > 0


def test_noise_starts_at_a_fit_that_was_stopped(data, tmp_path, small_parts, monkeypatch):
  x, y = data
  rows = mapped(x, tmp_path)
  det = DetClassifier(solver='streamed')
  passes = iter(range(1000))
  monkeypatch.setattr(stopping, 'agreed', lambda: next(passes) > 3)
  with pytest.warns(ConvergenceWarning, match='stopped when it was fitted to a part'):
    det.fit(rows, y)
  with pytest.warns(ConvergenceWarning):  # which keeps what DET has
    noisy = HetXLClassifier(solver='streamed', **NOISY).fit(rows, y, start=det)
  assert noisy.nll(x, y).mean() <= det.nll(x, y).mean() + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize('solver', ['lbfgs', 'streamed'])
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


# Each process prints what it has found, or what is wrong.
OF_A_PROCESS = """
import sys, warnings, zlib
import jax
import numpy as np
from het_plugin.estimators import HetXLClassifier, objective, stream
from het_plugin.system import distributed

distributed.initialize()
warnings.simplefilter('ignore')
stream.CHUNK_BYTES, stream.RUN_ROWS, stream.HELD_BYTES = 2**12, 16, 2**14  # several of each
objective.CACHE_BYTES = 2**14
y = np.load(sys.argv[1] + '/y.npy')
settings = {'C_noise': 0.1, 'num_factors': 2, 'num_samples': 2, 'max_iter': 4}
for name, mesh in (('x', (2, 1)), ('nan', (2, 1)), ('x', (1, 1))):
  if mesh == (1, 1) and jax.process_count() == 1:
    break
  x = np.load(f'{sys.argv[1]}/{name}.npy', mmap_mode='r')
  het_xl = HetXLClassifier(**settings, solver='streamed', mesh=mesh)
  try:
    p = het_xl.fit(x, y).predict_proba(x)
    params = b''.join(np.asarray(x).tobytes() for x in jax.tree.leaves(het_xl.params_))
    print('found', het_xl.objective_, het_xl.n_iter_, zlib.crc32(params), zlib.crc32(p.tobytes()))
    het_xl.predict(np.load(sys.argv[1] + '/nan.npy', mmap_mode='r'))
  except ValueError as error:
    print('wrong:', error)
"""


@pytest.mark.slow
def test_two_processes_give_the_digits_of_one(data, tmp_path):
  """Each has one device, and the one has two."""
  x, y = data
  np.save(tmp_path / 'x.npy', x)
  np.save(tmp_path / 'y.npy', y)
  x = x.copy()
  x[1400, 3] = np.nan  # one of the two reads it
  np.save(tmp_path / 'nan.npy', x)

  def lines_of(processes, devices):
    command = [sys.executable, '-m', 'launch.local', f'--processes={processes}']
    command += [f'--devices={devices}', '--', sys.executable, '-c', OF_A_PROCESS, str(tmp_path)]
    printed = subprocess.check_output(command, text=True).splitlines()
    lines = [line for line in printed if 'found' in line or 'wrong:' in line]
    return [
      [line[4:] for line in lines if line.startswith(f'[{number}] ')] for number in range(processes)
    ]

  (one,) = lines_of(1, 2)
  for *of_process, of_mesh in lines_of(2, 1):
    assert of_process == one
    found, *of_nan = one
    assert found.startswith('found') and len(of_nan) == 2
    assert all(line.endswith('NaN or infinity, first in row 1400') for line in of_nan)
    assert 'mesh=(1, 1) must be (2, 1): 2 processes cut the rows' in of_mesh


@pytest.mark.slow
def test_thousands_of_classes_on_eight_devices():
  """2,057 classes are 2,064 on 8 shards, and no device has more than its columns of W."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2_057, 16)).astype(np.float32)
  fit = HetXLClassifier(mesh=(1, 8), solver='streamed', max_iter=1, **NOISY)
  with pytest.warns(ConvergenceWarning, match='max_iter=1 is reached'):
    fit.fit(x, np.arange(2_057))
  assert fit.params_['head']['kernel'].shape == (16, 2_064)
  np.testing.assert_allclose(fit.predict_proba(x[:32]).sum(axis=1), 1.0, rtol=1e-4)


PEAK = """
import sys, warnings
import numpy as np
from het_plugin.estimators import DetClassifier
sys.path.insert(0, 'benchmarks')
from probe import memory_watched
warnings.simplefilter('ignore')
x = np.load(sys.argv[1], mmap_mode='r')[:int(sys.argv[2])]
y = np.arange(len(x)) % 10
with memory_watched() as found:
  DetClassifier(solver='streamed', max_iter=2).fit(x, y).predict(x)
print(max(found))
"""


@pytest.mark.slow
def test_the_memory_of_a_streamed_fit_does_not_grow_with_n(tmp_path):
  """120,000 rows more are 234 MiB more on disk. Pages of the file, which the system maps as it
  likes, do not count.
  """
  path = str(tmp_path / 'x.npy')
  file = np.lib.format.open_memmap(path, 'w+', np.float32, (200_000, 512))
  file.reshape(10, 20_000, 512)[:] = np.random.default_rng(0).normal(size=(20_000, 512))
  del file
  environment = os.environ | {'MALLOC_ARENA_MAX': '1'}

  def peak(num_rows):
    command = [sys.executable, '-c', PEAK, path, str(num_rows)]
    return float(subprocess.check_output(command, text=True, env=environment))

  small = peak(80_000)
  large = peak(200_000)
  assert large - small < 75, (small, large)  # -23 was seen


def test_features_in_files_and_of_two_bytes(data, tmp_path):
  x, y = data
  x = (x[:100] / 100).astype(jnp.bfloat16)
  y = (y[:100] % 4).astype(np.int32)
  path = str(tmp_path / 'x.safetensors')
  safetensors.numpy.save_file({'features': x, 'label': y}, path)
  expected = DetClassifier().fit(x.astype(np.float32), y).predict_log_proba(x)
  from_file = DetClassifier().fit(path)
  np.testing.assert_array_equal(from_file.predict_log_proba(path), expected)
  assert from_file.score(path) == (expected.argmax(axis=1) == y).mean()
  of_file = read(path)
  np.testing.assert_array_equal(DetClassifier().fit(of_file).predict_log_proba(of_file), expected)
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
  det = DetClassifier(solver='streamed', max_iter=2)
  with pytest.warns(ConvergenceWarning):
    np.testing.assert_array_equal(det.fit(mapped, y).predict(mapped), det.predict(x / 2))
  np.testing.assert_array_equal(mapped, x / 2)


@pytest.mark.parametrize('solver', ['lbfgs', 'streamed'])
def test_wrong_rows_are_one_sentence(data, solver, tmp_path):
  x, y = (rows[:60].copy() for rows in data)
  det = DetClassifier(solver=solver)
  with pytest.raises(ValueError, match=r'y has shape \(59,\); it must be \[60\]'):
    det.fit(x, y[1:])
  with pytest.raises(ValueError, match='y has one class only, 3'):
    det.fit(x, np.full(60, 3))
  with pytest.raises(ValueError, match='does not exist'):
    det.fit(str(tmp_path / 'none.npz'))
  with pytest.raises(ValueError, match='X has several arrays, x, y: give the features, or a path'):
    det.fit({'x': x, 'y': y})
  x[7, 2] = np.nan
  with pytest.raises(ValueError, match='Input X contains NaN or infinity.* in row 7'):
    det.fit(mapped(x, tmp_path), y)
  with pytest.raises(ValueError, match=r'X has shape \(60,\), and must be \[N, D\]'):
    det.fit(x[:, 0], y)


def test_infinity_in_a_file_has_no_probability(data, tmp_path):
  """A sigmoid of infinity would be 1."""
  x, y = (rows[:60].copy() for rows in data)
  with pytest.warns(ConvergenceWarning):
    det = DetClassifier(max_iter=2).fit(x, np.eye(y.max() + 1, dtype=int)[y])
  x[7, 2] = np.inf
  with pytest.raises(ValueError, match='Input X contains NaN or infinity.* in row 7'):
    det.predict_proba(mapped(x, tmp_path))


def test_more_classes_than_rows_is_a_warning(data):
  x, _ = data
  with pytest.warns(UserWarning, match='y has K=11 classes and X has N=5 rows'):
    DetClassifier(max_iter=30).fit(x[:5], np.full((5, 11), 1 / 11))
