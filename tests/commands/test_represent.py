"""`python -m het_plugin.represent` as a user runs it: a digits run, npz files, folders, arrays."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from PIL import Image

from het_plugin import data, estimators, runs, weights
from het_plugin import rows as rows_lib
from het_plugin.commands import represent
from het_plugin.config import parsing
from het_plugin.runs.starting import train_from_gin
from tests.training.toy_run import series

TINY = ['vit.width = 16', 'vit.depth = 1', 'vit.mlp_dim = 16', 'vit.num_heads = 2']


@pytest.fixture
def call(run_main, tmp_path):
  """Runs the main: (rows of --json, stdout); for code 2, the line of the error."""

  def call_main(*arguments, code=0):
    table = tmp_path / 'table.json'
    printed = run_main(represent, *arguments, f'--json={table}', code=code)
    return printed if code else (json.loads(table.read_text())['files'], printed)

  return call_main


def assert_representations_equal(got, want, atol=0.0):
  np.testing.assert_allclose(got.features, want.features, atol=atol, rtol=atol)
  np.testing.assert_array_equal(got.labels, want.labels)
  np.testing.assert_array_equal(got.index, want.index)
  assert got.class_names == want.class_names


@pytest.mark.slow
def test_digits(digits_run, call, tmp_path):
  folder, _ = digits_run
  out = tmp_path / 'out'
  common = (f'--checkpoint={folder}', '--dataset=digits', '--layers=pre_logits,patches')
  rows, printed = call(*common, f'--output_dir={out}')
  assert [(r['split'], r['layer'], r['num_examples'], r['dim']) for r in rows] == [
    *(('train', layer, 1438, 16) for layer in ('pre_logits', 'patches')),
    *(('test', layer, 359, 16) for layer in ('pre_logits', 'patches')),
  ]
  assert all(row['seconds'] > 0 and row['images_per_second'] > 0 for row in rows)
  assert str(out / 'digits/pre_logits/test.safetensors') in printed

  test = rows_lib.read(str(out / 'digits/pre_logits/test.safetensors'))
  batch = next(
    data.get_dataset(
      data.DatasetConfig('digits', {'image': 8, 'label': 1}, 'test', 359, shuffle=False)
    )
  )
  np.testing.assert_array_equal(test.labels, batch['label'])
  np.testing.assert_array_equal(test.index, np.arange(359))
  assert test.class_names == tuple('0123456789')
  about = test.provenance
  assert about['checkpoint'] == str(folder / 'checkpoint_2') and about['step'] == 2
  assert (about['dataset'], about['split'], about['layer']) == ('digits', 'test', 'pre_logits')
  assert (about['dtype'], about['image_size'], about['num_examples']) == ('float32', 8, 359)
  assert 'digits' in about['config'] and about['versions']['jax'] == jax.__version__
  assert about['created'] and 'represent' in about['command']

  # Mesh, batch size and format change no result.
  call(
    *common[:2],
    '--splits=test',
    f'--output_dir={tmp_path}/other',
    '--format=npz',
    '--batch_size=40',
    '--gin.PjitPartitioner.num_partitions=2',
  )
  other = rows_lib.read(str(tmp_path / 'other/digits/pre_logits/test.npz'))
  assert_representations_equal(other, test, atol=1e-5)

  before = {path: path.stat().st_mtime_ns for path in out.rglob('*.safetensors')}
  rows, printed = call(*common, f'--output_dir={out}')
  assert printed.count('is complete already.') == 4 and rows[0]['seconds'] is None
  assert {path: path.stat().st_mtime_ns for path in out.rglob('*.safetensors')} == before
  of_two = '--gin.PjitPartitioner.num_partitions=2'
  assert 'is complete already.' in call(*common, f'--output_dir={out}', of_two)[1]

  error = call(*common, f'--output_dir={out}', '--gin.eval/Integrator.num_samples=3', code=2)
  assert 'other settings (eval/Integrator.num_samples: ' in error and '-> 3)' in error
  error = call(f'--checkpoint={folder}/checkpoint_1', *common[1:], f'--output_dir={out}', code=2)
  assert 'train.safetensors was made with other settings (step 2, now 1; params' in error
  call(f'--checkpoint={folder}/checkpoint_1', *common[1:], f'--output_dir={out}', '--overwrite')
  assert rows_lib.read(str(out / 'digits/patches/test.safetensors')).provenance['step'] == 1


@pytest.mark.slow
def test_a_head_fitted_to_representations_goes_over_the_backbone(digits_run, call, tmp_path):
  """A run of one step of length 0 has the NLL of the estimator, as has the estimator of the run."""
  call(f'--checkpoint={digits_run[0]}', '--dataset=digits', f'--output_dir={tmp_path}')
  train, test = (f'{tmp_path}/digits/pre_logits/{x}.safetensors' for x in ('train', 'test'))
  fitted = estimators.DetClassifier(max_iter=20, tol=0.1).fit(train)
  start = f'{tmp_path}/start.safetensors'
  estimators.to_checkpoint(fitted, start, backbone=runs.configuration(digits_run[0]))
  parsing.parse_config(
    ['het_plugin/gin/runs/digits_smoke.gin', 'het_plugin/gin/heads/det.gin'],
    [
      f"MODEL_DIR = '{tmp_path}/run'",
      'TRAIN_STEPS = 1',
      'EVAL_PERIOD = 1',
      'SAVE_PERIOD = 1',
      'EVAL_BATCH_SIZE = 40',
      'EVAL_STEPS = 9',
      'WARMUP_STEPS = 0',
      'LEARNING_RATE = 1e-12',
      'WEIGHT_DECAY = 0.0',
      'BATCH_SIZE = 8',
      'warmup_schedule.init_value = 0.0',
      'warmup_schedule.end_value = 0.0',
      *TINY,
      'CheckpointConfig.restore = @RestoreCheckpointConfig()',
      f"RestoreCheckpointConfig.path = '{start}'",
    ],
  )
  train_from_gin()
  (trained,) = series(tmp_path / 'run', 'training_eval/digits/nll').values()
  y = rows_lib.read(test).label
  assert trained == pytest.approx(fitted.nll(test, y).mean(), abs=1e-4)
  opened = runs.head_estimator(str(tmp_path / 'run'))
  assert opened.nll(test, y).mean() == pytest.approx(trained, abs=1e-4)


def test_bounded_pooled_and_stored_in_half(digits_run, call, tmp_path):
  rows, _ = call(
    f'--checkpoint={digits_run[0]}',
    f'--output_dir={tmp_path}',
    '--layers=patches',
    '--dataset=digits',
    '--splits=train',
    '--max_examples=100',
    '--pool=none',
    '--dtype=bfloat16',
  )
  assert (rows[0]['num_examples'], rows[0]['dim']) == (100, 4 * 16)
  few = rows_lib.read(rows[0]['file'])
  assert few.provenance['max_examples'] == 100 and few.index.max() > 100  # not the first ones
  rounded = few.features.astype(ml_dtypes.bfloat16).astype(np.float32)
  np.testing.assert_array_equal(few.features, rounded)


@pytest.mark.slow
def test_images_of_ones_own(digits_run, call, tmp_path):
  folder, params = digits_run
  arrays = weights.export_params(traverse_util.flatten_dict(params, sep='/'), 10, 2)
  weights.write_arrays(tmp_path / 'vit.npz', arrays)
  layer = {'pre_logits/kernel': np.ones((16, 12)), 'pre_logits/bias': np.ones(12)}
  weights.write_arrays(tmp_path / 'with_layer.npz', {**arrays, **layer})
  common = (
    f'--checkpoint={tmp_path}/vit.npz',
    '--gin.BACKBONE=@vit()',
    "--gin.vit.variant='Ti/4'",
    "--gin.vit.pooling='gap'",
    *(f'--gin.{x.replace(" ", "")}' for x in TINY),
    '--gin.IMAGE_SIZE=8',
    f'--output_dir={tmp_path}/out',
  )
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (30, 8, 8), np.uint8)
  labels = np.arange(30) % 3
  split = np.array(['a', 'b', 'b'] * 10)
  np.savez(tmp_path / 'birds.npz', image=images, label=labels, split=split)
  rows, _ = call(*common, f'--dataset={tmp_path}/birds.npz')
  assert [(row['split'], row['num_examples']) for row in rows] == [('a', 10), ('b', 20)]
  b = rows_lib.read(f'{tmp_path}/out/birds/pre_logits/b.safetensors')
  np.testing.assert_array_equal(b.label, labels[split == 'b'])
  assert b.provenance['step'] is None and 'image.npy' in b.provenance['dataset_version']

  # The layer before the head of vision_transformer's ImageNet-21k files is taken up.
  with_layer = (f'--checkpoint={tmp_path}/with_layer.npz', f'--output_dir={tmp_path}/layer')
  rows, _ = call(*common, f'--dataset={tmp_path}/birds.npz', '--splits=a', *with_layer)
  assert rows[0]['dim'] == 12

  (tmp_path / 'other').mkdir()
  np.savez(tmp_path / 'other/birds.npz', image=images[::-1], label=labels, split=split)
  error = call(*common, f'--dataset=npz:{tmp_path}/other/birds.npz', code=2)
  assert 'other settings (dataset; dataset_version)' in error

  for name in ('wren', 'robin'):
    (tmp_path / 'garden' / name).mkdir(parents=True)
    for i in range(60):
      Image.fromarray(images[i % 30]).save(tmp_path / 'garden' / name / f'{i:02}.png')
  (tmp_path / 'garden/wren/07.png').write_bytes(b'no image')
  rows, _ = call(*common, f'--dataset={tmp_path}/garden')
  assert sum(row['num_examples'] for row in rows) == 119
  train = rows_lib.read(f'{tmp_path}/out/garden/pre_logits/train.safetensors')
  assert train.class_names == ('robin', 'wren') and set(train.label) == {0, 1}
  assert train.provenance['dataset_version'].startswith('120 files ')
  other = (tmp_path / 'garden').rename(tmp_path / 'other/garden')
  (other / 'wren/08.png').rename(other / 'robin/99.png')
  error = call(*common, f'--dataset={other}', code=2)
  assert 'other settings (dataset; dataset_version 120 files ' in error


def test_arrays_made_elsewhere(call, tmp_path):
  rng = np.random.default_rng(0)
  features = rng.normal(size=(6, 4))
  labels = np.arange(6) % 3
  np.save(tmp_path / 'x.npy', features)
  np.save(tmp_path / 'y.npy', labels)
  common = (f'--arrays={tmp_path}/x.npy,{tmp_path}/y.npy', f'--output_dir={tmp_path}/out')
  rows, _ = call(*common)
  assert rows[0]['file'] == str(tmp_path / 'out/x/features/all.safetensors')
  read = rows_lib.read(rows[0]['file'])
  np.testing.assert_array_equal(read.features, features.astype(np.float32))
  np.testing.assert_array_equal(read.label, labels)
  assert read.provenance['source'] == common[0].removeprefix('--arrays=')
  _, printed = call(*common)
  assert 'is complete already' in printed
  np.save(tmp_path / 'y.npy', labels[::-1])
  assert 'other settings (sha256' in call(*common, code=2)

  split = np.array(['train', 'test', 'train', 'train', 'test', 'train'])
  np.savez(tmp_path / 'f.npz', embeddings=features, targets=labels, split=split)
  rows, _ = call(f'--arrays={tmp_path}/f.npz', f'--output_dir={tmp_path}/out', '--dtype=float16')
  assert [(row['split'], row['num_examples']) for row in rows] == [('test', 2), ('train', 4)]
  np.testing.assert_array_equal(
    rows_lib.read(rows[0]['file']).features, features[[1, 4]].astype(np.float16)
  )
  np.savez(tmp_path / 'f.npz', embeddings=features * 1e6, targets=labels)
  error = call(
    f'--arrays={tmp_path}/f.npz', f'--output_dir={tmp_path}/o', '--dtype=float16', code=2
  )
  assert 'not finite in float16' in error
  split = np.array(['a b', 'a_b'] * 3)
  np.savez(tmp_path / 'f.npz', embeddings=features, targets=labels, split=split)
  common = f'--arrays={tmp_path}/f.npz', f'--output_dir={tmp_path}/o', '--overwrite'
  assert 'two of the splits a b, a_b give the same file name' in call(*common, code=2)
  assert '--gin_bindings cannot go with --arrays' in call(*common, '--gin.IMAGE_SIZE=8', code=2)


@pytest.mark.parametrize(
  'arguments,message',
  [
    (['--layers=pre_logitz'], "['pre_logitz'] are unknown: choose from patches, block00, "),
    (['--dataset=glyphs_core', '--splits=train'], '--splits=train: this split of glyphs_core is'),
    (['--batch_size=6'], 'batch_size=6 must be'),
    (['--image_size=12'], '--image_size=12 does not fit the parameters of'),
    (['--arrays=x.npz'], '--checkpoint cannot go with --arrays=x.npz'),
  ],
)
def test_bad_settings_are_one_sentence_and_write_nothing(
  digits_run, call, tmp_path, arguments, message
):
  out = tmp_path / 'out'
  common = (f'--checkpoint={digits_run[0]}', '--dataset=digits', f'--output_dir={out}')
  assert message in call(*common, *arguments, code=2)
  assert not out.exists()


def test_splits_by_comma_outside_brackets():
  info = data.TaskInfo(2, False, 1, None, {'train': None, 'a': 3, 'none': 0})
  assert represent.choose_splits('x', info, None) == ['a']
  names = represent.choose_splits('x', info, 'train[:5], a[1,2],a')
  assert names == ['train[:5]', 'a[1,2]', 'a']
  with pytest.raises(ValueError, match=r'a\?,a!.*same file name'):
    represent.choose_splits('x', info, 'a?,a!')
