"""Programs of `python -m het_plugin.export --format`, run where het_plugin cannot be imported."""

import dataclasses
import datetime
import functools
import importlib.util
import json
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest

import gin
from het_plugin import backbones, estimators, heads, models, runs, weights
from het_plugin.commands import export
from het_plugin.commands import export as serve
from het_plugin.config import parsing
from het_plugin.integrate import Integrator
from het_plugin.runs.starting import train_from_gin
from het_plugin.weights import onnx_graph, programs
from tests.evaluation.small_contrastive import SmallContrastive
from tests.feature_rows import write_rows

NEEDS_ONNX = pytest.mark.skipif(
  importlib.util.find_spec('onnxruntime') is None, reason="needs the extra 'onnx'"
)
FORMATS = [pytest.param(x, marks=NEEDS_ONNX if x == 'onnx' else ()) for x in programs.NEEDED]

# Each gives run(x) -> {output: array}, in the lines of docs/serve.md.
LOAD = {
  'stablehlo': """
from jax import export
program = export.deserialize(bytearray(open(f'{folder}/program.stablehlo', 'rb').read()))
run = program.call
""",
  'saved_model': """
import tensorflow as tf
program = tf.saved_model.load(folder)
run = lambda x: program.signatures['serving_default'](tf.constant(x))
""",
  'onnx': """
import onnxruntime
program = onnxruntime.InferenceSession(f'{folder}/model.onnx')
run = lambda x: dict(zip([o.name for o in program.get_outputs()],
                         program.run(None, {program.get_inputs()[0].name: x})))
""",
}
PROGRAM = """
import sys
sys.modules['het_plugin'] = None
import numpy as np
folder, inputs, outputs = sys.argv[1:]
{load}
x = np.load(inputs)
found = {{}}
for size in (1, 7, len(x)):
  found |= {{f'{{name}}_{{size}}': np.asarray(y) for name, y in run(x[:size]).items()}}
np.savez(outputs, **found)
"""


def served(folder, kind, x, tmp_path):
  """The outputs of a program for 100 rows, the same for the first rows alone."""
  np.save(tmp_path / 'x.npy', x)
  code = PROGRAM.format(load=LOAD[kind])
  files = tmp_path / 'x.npy', tmp_path / 'found.npz'
  subprocess.run([sys.executable, '-c', code, str(folder), *map(str, files)], check=True)
  with np.load(tmp_path / 'found.npz') as found:
    found = dict(found)
  names = {name.rsplit('_', 1)[0] for name in found}
  for name in names:
    for size in (1, 7):
      np.testing.assert_allclose(
        found[f'{name}_{size}'],
        found[f'{name}_{len(x)}'][:size],
        atol=1e-4 if 'entropy' in name else 1e-5,
      )
  return {name: found[f'{name}_{len(x)}'] for name in names}


@pytest.fixture(scope='module')
def images():
  return np.random.default_rng(0).uniform(-1, 1, (100, 8, 8, 1)).astype(np.float32)


def with_samples(run, num_samples, shared):
  """The run, evaluated by so many samples."""
  model = run.model
  model.eval_integrator = dataclasses.replace(model.eval_integrator, num_samples=num_samples)
  model.shared_draws = shared
  return dataclasses.replace(run, _compiled={})


@pytest.fixture(scope='module')
def predicted(digits_run, images):
  """What `predict` gives where all images share their points, and where each has its own."""
  run = runs.open_run(digits_run[0])
  shared, own = (with_samples(run, 64, x).predict({'image': images}) for x in (True, False))
  return shared, own


@pytest.mark.slow
@pytest.mark.parametrize('kind', FORMATS)
def test_a_softmax_is_predict_with_shared_draws(
  kind, digits_run, predicted, run_main, images, tmp_path
):
  folder = tmp_path / kind
  settings = (
    f'--checkpoint={digits_run[0]}',
    f'--output={folder}',
    f'--format={kind}',
    '--entropies',
    '--gin.eval/Integrator.num_samples=64',
  )
  assert 'image [None, 8, 8, 1] -> entropy [None]' in run_main(export, *settings)
  found = served(folder, kind, images, tmp_path)
  assert 'probabilities: differs by at most' in run_main(export, f'--check={folder}')
  expected, own = predicted
  p = np.exp(expected['log_prob'])
  np.testing.assert_allclose(found['probabilities'], p, atol=1e-5)
  np.testing.assert_allclose(found['probabilities'].sum(axis=1), 1, atol=1e-5)
  np.testing.assert_allclose(found['entropy'], -(p * np.log(p)).sum(axis=1), atol=1e-4)
  np.testing.assert_allclose(found['expected_entropy'], expected['expected_entropy'], atol=1e-4)
  # Each image has its own points by default.
  difference = np.abs(found['probabilities'] - np.exp(own['log_prob'])).max()
  print(f'the largest difference to draws of each image: {difference:.2g}')
  assert 1e-5 < difference < 0.03

  about = json.loads((folder / 'metadata.json').read_text())
  assert about['class_names'] == [str(k) for k in range(10)] and about['link'] == 'softmax'
  assert about['head'] == 'HetXL' and about['temperature'] == {'tau_min': 0.05, 'tau_max': 5.0}
  assert about['image_size'] == 8 and about['image_range'] == [-1, 1] and about['step'] == 2
  assert about['tau'] == pytest.approx(2.525, abs=0.1) and about['format'] == kind


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
  return write_rows(tmp_path_factory.mktemp('features'), 100)


@pytest.fixture(scope='module')
def features_run(rows, tmp_path_factory):
  """A sigmoid on rows of features."""
  folder = tmp_path_factory.mktemp('runs') / 'features'
  parsing.parse_config(
    ['het_plugin/gin/runs/features.gin', 'het_plugin/gin/heads/het.gin',
     'het_plugin/gin/links/sigmoid.gin'],
    [f"MIXTURE_OR_TASK_NAME = 'features:{rows[0]}'", f"MODEL_DIR = '{folder}'", 'NUM_CLASSES = 5',
     'BATCH_SIZE = 16', 'TRAIN_STEPS = 2', 'WARMUP_STEPS = 0',
     'train.train_eval_dataset_cfg = None'],
  )  # fmt: skip
  train_from_gin()
  gin.clear_config()
  return folder


@NEEDS_ONNX
@pytest.mark.slow
def test_a_sigmoid_on_features_is_predict(features_run, rows, run_main, tmp_path):
  x = rows[1]
  folder = tmp_path / 'onnx'
  run_main(export, f'--checkpoint={features_run}', f'--output={folder}', '--format=onnx')
  found = served(folder, 'onnx', x, tmp_path)
  assert set(found) == {'probabilities'}
  expected = runs.open_run(features_run).predict({'image': x[:, None, None]})['log_prob']
  np.testing.assert_allclose(found['probabilities'], np.exp(expected), atol=1e-5)
  about = json.loads((folder / 'metadata.json').read_text())
  assert about['input'] == {'name': 'features', 'shape': [None, 6], 'dtype': 'float32'}


@pytest.mark.slow
def test_an_estimator_is_its_predict_proba(rows, tmp_path):
  _, x, y = rows
  x = x + np.float32(1e5)  # float32 does not hold the mean to all digits that x has around it
  het = estimators.HetHClassifier(
    C_noise=0.03, num_factors=2, num_buckets=4, num_samples=2, max_iter=5, tol=0.1
  )
  het.fit(x, np.array([*'abcde'])[y]).calibrate(x, np.array([*'abcde'])[y], 'vector')
  about = estimators.export(het, str(tmp_path / 'het'), 'stablehlo', entropies=True)
  assert about['class_names'] == [*'abcde']
  found = served(tmp_path / 'het', 'stablehlo', x, tmp_path)
  np.testing.assert_allclose(found['probabilities'], het.predict_proba(x), atol=1e-5)
  total, expected = het.entropy(x)
  np.testing.assert_allclose(found['entropy'], total, atol=1e-4)
  np.testing.assert_allclose(found['expected_entropy'], expected, atol=1e-4)


def test_a_saved_model_has_the_class_names(rows, tmp_path):
  tf = pytest.importorskip('tensorflow')
  det = estimators.DetClassifier(max_iter=5, tol=1.0).fit(rows[1], np.array([*'äbcde'])[rows[2]])
  estimators.export(det, str(tmp_path / 'det'), 'saved_model')
  path = tf.saved_model.load(str(tmp_path / 'det')).class_names.asset_path.numpy().decode()
  with open(path, encoding='utf-8') as file:
    assert sorted(file.read().splitlines()) == [*'bcdeä']


def test_a_program_is_compared_with_what_its_model_gave(rows, run_main, tmp_path):
  det = estimators.DetClassifier(max_iter=5, tol=1.0).fit(rows[1], rows[2])
  folder = tmp_path / 'det'
  about = estimators.export(det, folder)
  assert about['jax'] == jax.__version__
  month = programs.months_after(datetime.date.today(), 6)
  assert about['promised_until'] == month.isoformat()
  file = folder / 'program.stablehlo'
  check = export, f'--check={file}'
  assert float(run_main(*check).split()[-1]) < 1e-5
  assert '--output has no effect on --check' in run_main(*check, '--output=x', code=2)
  with np.load(folder / 'example.npz') as example:
    arrays = dict(example)
  wrong = arrays | {'probabilities': arrays['probabilities'] + np.float32(0.01)}
  np.savez(folder / 'example.npz', **wrong)
  assert 'gives probabilities that differ by 0.01 from' in run_main(*check, code=2)
  file.write_bytes(b'')
  error = run_main(*check, code=2)
  assert f'promised until {about["promised_until"]}' in error
  assert '--format=saved_model or onnx, which last' in error
  (folder / 'example.npz').unlink()
  assert 'is not a program with an example.npz beside it' in run_main(*check, code=2)


def test_six_months_end_on_the_last_day_of_a_short_month():
  assert programs.months_after(datetime.date(2026, 8, 31), 6) == datetime.date(2027, 2, 28)
  assert programs.months_after(datetime.date(2026, 6, 30), 6) == datetime.date(2026, 12, 30)


@NEEDS_ONNX
def test_what_cannot_be_exported(digits_run, features_run, run_main, tmp_path, monkeypatch):
  run = f'--checkpoint={digits_run[0]}'
  out = tmp_path / 'out'
  command = export, run, f'--output={out}'
  error = run_main(*command, '--format=tflite', code=2)
  assert "format='tflite' is unknown: choose one of stablehlo, saved_model, onnx" in error
  assert '--entropies are outputs of a program: set --format' in run_main(
    *command, '--entropies', code=2
  )
  out.mkdir()
  (out / 'notes').write_text('mine')
  assert 'is no folder of a program' in run_main(*command, '--format=onnx', code=2)
  assert 'no command has written it' in run_main(
    export, run, f'--output={out}/notes', '--format=onnx', code=2
  )
  assert 'must be a local folder' in run_main(
    export, run, '--output=gs://a/b', '--format=onnx', code=2
  )
  for folder in ('.', f'{tmp_path}/..'):
    assert 'must end in the name of a folder' in run_main(
      export, run, f'--output={folder}', '--format=onnx', code=2
    )
  found = programs.importlib.util.find_spec
  monkeypatch.setattr(
    programs.importlib.util, 'find_spec', lambda name: None if 'onnx' in name else found(name)
  )
  error = run_main(*command, '--format=onnx', code=2)
  assert "needs onnx and onnxruntime: pip install 'het_plugin[onnx]'" in error
  monkeypatch.undo()
  weights.write_arrays(tmp_path / 'vit.npz', runs.configuration(digits_run[0]).published_params())
  config = f'--gin_file={digits_run[0]}/config.gin'
  published = f'--checkpoint={tmp_path}/vit.npz', config, f'--output={tmp_path}/new'
  assert 'vit.npz is a published file, whose head is not trained' in run_main(
    export, *published, '--format=onnx', code=2
  )
  (tmp_path / 'vit.npz').unlink()
  monkeypatch.setattr(programs, 'MAX_BYTES', 100)
  opened = runs.open_run(features_run)
  program = programs.Program(None, opened.params, 'x', (6,), {})
  with pytest.raises(ValueError, match='use saved_model'):
    programs.write(program, str(tmp_path / 'large'), 'stablehlo')
  assert {x.name for x in tmp_path.iterdir()} == {'out'}


def test_a_contrastive_model_is_refused(digits_run, tmp_path):
  pairs = dataclasses.replace(runs.open_run(digits_run[0]), model=SmallContrastive())
  with pytest.raises(ValueError, match='is a contrastive model, whose classes are texts'):
    serve.export(pairs, str(tmp_path / 'out'), 'stablehlo')
  assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_experts_that_route_groups_in_training_serve_any_batch(images, tmp_path):
  moe = backbones.SparseMoe(num_experts=2, layers='every_1')
  backbone = backbones.ViT(patch_size=4, width=8, depth=1, mlp_dim=8, num_heads=1, moe=moe)
  model = models.ClassificationModel(backbone, heads.Det(3), None, None, Integrator(2))
  init = functools.partial(model.get_initial_variables, input_shapes={'image': (1, 8, 8, 1)})
  shapes = jax.eval_shape(init, jax.random.key(0))['params']
  random = np.random.default_rng(0)
  params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes)
  program = programs.Program(model.served, params, 'image', (8, 8, 1), {})
  programs.write(program, str(tmp_path / 'moe'), 'stablehlo')
  expected = jax.jit(program.__call__)(images[:7])['probabilities']
  call = jax.export.deserialize((tmp_path / 'moe/program.stablehlo').read_bytes()).call
  for size in (1, 7):
    found = call(images[:size])['probabilities']
    np.testing.assert_allclose(found, expected[:size], atol=1e-6)


@NEEDS_ONNX
def test_a_program_replaces_a_program_as_a_whole(rows, tmp_path, monkeypatch):
  _, x, y = rows
  det = estimators.DetClassifier(max_iter=5, tol=1.0).fit(x, y)
  folder = tmp_path / 'det'
  estimators.export(det, folder, 'onnx')
  (tmp_path / '.old.det' / 'left').mkdir(parents=True)  # by an export that was killed
  link = tmp_path / 'link'
  link.symlink_to(folder)
  estimators.export(det, str(link), 'stablehlo')
  assert link.readlink() == folder
  link.unlink()
  names = {'metadata.json', 'example.npz', 'program.stablehlo'}
  assert {x.name for x in folder.iterdir()} == names

  def fail(*_):
    raise OSError('disk full')

  monkeypatch.setitem(programs._WRITERS, 'onnx', fail)
  with pytest.raises(OSError, match='disk full'):
    estimators.export(det, str(folder), 'onnx')
  assert {x.name for x in folder.iterdir()} == names and [*tmp_path.iterdir()] == [folder]


@NEEDS_ONNX
@pytest.mark.slow
def test_onnx_computes_in_float32_what_the_run_computes_in_bfloat16(digits_run, tmp_path):
  run = runs.open_run(digits_run[0], bindings=['vit.dtype = "bfloat16"'])
  x = np.random.default_rng(0).uniform(-1, 1, (5, 8, 8, 1)).astype(np.float32)
  serve.export(run, str(tmp_path / 'het_xl'), 'onnx', entropies=True)
  found = served(tmp_path / 'het_xl', 'onnx', np.tile(x, (20, 1, 1, 1)), tmp_path)
  exact = with_samples(runs.open_run(digits_run[0]), run.model.eval_integrator.num_samples, True)
  expected = np.exp(exact.predict({'image': x})['log_prob'])
  np.testing.assert_allclose(found['probabilities'][:5], expected, atol=1e-5)


def test_a_backbone_of_ones_own_is_compared_in_float32_too():
  module = serve._float32(backbones.PlainBackbone(nn.Dense(4, dtype='bfloat16')))
  assert module.module.dtype == np.float32


@NEEDS_ONNX
def test_what_onnx_cannot_compute_is_named(tmp_path):
  for function, words in (
    (jax.numpy.arctan, "the operation 'atan'"),
    (lambda x: jax.lax.map(jax.numpy.sum, x), 'a loop over the batch'),
  ):
    program = programs.Program(lambda _, x, f=function: {'y': f(x)}, {}, 'x', (3,), {})
    with pytest.raises(ValueError, match=f'{words}: use stablehlo or saved_model'):
      programs.write(program, str(tmp_path / 'out'), 'onnx')
  assert not [*tmp_path.iterdir()]


@NEEDS_ONNX
def test_a_wrong_translation_is_refused(rows, tmp_path, monkeypatch):
  _, x, y = rows
  det = estimators.DetClassifier(max_iter=5, tol=1.0).fit(x, y)
  monkeypatch.setitem(onnx_graph.OPERATIONS, 'exp', lambda graph, eqn, x: graph.op('Neg', x))
  with pytest.raises(ValueError, match='onnx program gives probabilities that differ by'):
    estimators.export(det, str(tmp_path / 'det'), 'onnx')
  assert not [*tmp_path.iterdir()]
