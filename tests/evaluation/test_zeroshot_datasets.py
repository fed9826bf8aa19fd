"""Evaluation of a small contrastive model over a mesh, against numpy on the same examples."""

import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.data import TaskInfo, get_dataset, one_pass, pipeline
from het_plugin.evaluation import zeroshot_datasets
from het_plugin.evaluation.zeroshot_datasets import (
  ZeroShotDataset,
  ZeroShotEvaluator,
)
from het_plugin.measures.zeroshot import retrieval_recall
from het_plugin.runs import Run
from tests.evaluation import small_contrastive
from tests.evaluation.batches import in_batches
from tests.evaluation.small_contrastive import Letters, SmallContrastive

SIZE = 8
NAMES = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
DIGITS = ZeroShotDataset('digits', 'digits', templates=('{}', 'a {}'), class_names=NAMES)


def make(model_shards=2, batch_size=64, **kwargs):
  """An evaluator, and a run of a model with its initial parameters."""
  model, partitioner, specs, params = small_contrastive.opened(0, model_shards)
  run = Run(model, partitioner, params, specs, SIZE, channels=1)
  return ZeroShotEvaluator(Letters(), batch_size, **kwargs), run


def digits(split):
  cfg = one_pass('digits', split, image_size=SIZE, max_labels=1, batch_size=512, bounded=False)
  (batch,) = get_dataset(cfg)
  real = batch['mask'] > 0
  return batch['image'][real], batch['label'][real, 0]


@pytest.mark.slow
def test_digits_over_the_mesh():
  evaluator, run = make(model_shards=2, batch_size=64)
  done = []
  params = run.params
  found = evaluator(run, DIGITS, done.append)
  assert found.num_examples == sum(done) == evaluator.check(run, DIGITS) == 359
  assert found.num_classes == 10 and found.classes_alike == 0
  images, labels = digits(DIGITS.split)
  classes = small_contrastive.class_vectors(params, NAMES, DIGITS.templates, Letters())
  scores = small_contrastive.image_vectors(params, images) @ classes.T
  right = np.argsort(-scores, axis=1, kind='stable') == labels[:, None]
  assert found.top1 == pytest.approx(right[:, :1].any(1).mean(), abs=1e-12)
  assert found.top5 == pytest.approx(right[:, :5].any(1).mean(), abs=1e-12)
  assert 0 < found.top1 < found.top5 < 1


@pytest.mark.slow
def test_samples_rank_by_probabilities():
  evaluator, run = make(num_samples=2)
  params = run.params
  images, labels = digits('test')
  classes = small_contrastive.class_vectors(params, NAMES, DIGITS.templates, Letters())
  batch = {'image': images, 'index': np.arange(len(images))}
  log_prob = jax.jit(SmallContrastive().class_log_prob, static_argnums=3)(
    jax.device_get(params), batch, classes.astype(np.float32), 2
  )
  expected = float(np.mean(np.argmax(log_prob, axis=1) == labels))
  assert evaluator(run, DIGITS).top1 == pytest.approx(expected, abs=0.006)  # two near-ties


@pytest.fixture
def fake_data(monkeypatch):
  """Lets a test say what is read: fake_data(info, arrays) returns the settings of the reading."""

  def install(info, arrays):
    settings = []

    @contextlib.contextmanager
    def open_split(self, split, max_examples=None, *, task, batch_size, **others):
      settings.append(others)
      rows = self.partitioner.batch_rows(batch_size)
      yield in_batches(arrays, batch_size, rows), len(arrays['index'])

    for module in (zeroshot_datasets, pipeline):  # `classification_info` asks the second one
      monkeypatch.setattr(module, 'task_info', lambda name: info)
    monkeypatch.setattr(Run, 'open_split', open_split)
    return settings

  return install


@pytest.mark.slow
def test_several_labels_and_none(fake_data, monkeypatch):
  monkeypatch.setattr(zeroshot_datasets, '_ROWS', 2)
  rng = np.random.default_rng(0)
  label = np.array([[3, -1], [0, 3], [-1, -1], [1, 2], [2, -1]], np.int32)
  image = rng.normal(size=(5, SIZE, SIZE, 1)).astype(np.float32)
  info = TaskInfo(4, True, 1, None, types.MappingProxyType({'test': 5}), max_labels=2)
  arrays = {'image': image, 'label': label, 'index': np.arange(5, dtype=np.int32)}
  fake_data(info, arrays)
  evaluator, run = make(batch_size=8)
  params = run.params
  names = ('aa', 'bcd', 'ef', 'g')
  dataset = ZeroShotDataset('x', 'x', class_names=names, templates='none')
  found = evaluator(run, dataset)
  classes = small_contrastive.class_vectors(params, names, ('{}',), Letters())
  best = np.argmax(small_contrastive.image_vectors(params, image) @ classes.T, axis=1)
  assert found.top1 == pytest.approx(np.mean((label == best[:, None]).any(axis=1)))
  assert found.top5 == pytest.approx(0.8)  # the image without a label is wrong even so
  assert found.num_examples == 5
  fake_data(dataclasses.replace(info, multi_label=False), arrays)
  with pytest.raises(
    ValueError, match="1 of the 5 examples of x have no label in the split 'test'"
  ):
    evaluator(run, dataset)


@pytest.mark.slow
def test_captions(fake_data):
  """Nine pairs of seven images. Two images come twice, and some captions are alike."""
  rng = np.random.default_rng(1)
  image = rng.normal(size=(7, SIZE, SIZE, 1)).astype(np.float32)[[0, 1, 2, 3, 4, 5, 6, 0, 1]]
  texts = ['cat', 'dog', 'cat', 'a bird', 'bird', 'dog', 'cow', 'feline', 'dog']
  text = Letters()(texts)
  splits = {'test': 9}
  info = types.SimpleNamespace(channels=1, splits=splits, vocabulary='letters')
  arrays = {'image': image, 'text': text, 'index': np.arange(9, dtype=np.int32)}
  settings = fake_data(info, arrays)
  evaluator, run = make(batch_size=4, model_shards=2)
  params = run.params
  _, words = np.unique(text, axis=0, return_inverse=True)
  vectors = (
    small_contrastive.image_vectors(params, image[:7]),
    small_contrastive.text_vectors(params, text),
  )
  for alike in (False, True):
    dataset = ZeroShotDataset('pairs', 'pairs', identical_captions_right=alike)
    assert evaluator.check(run, dataset) == 9
    found = evaluator(run, dataset)
    wanted = {'text_length': 12, 'vocabulary': 'letters'}
    assert wanted.items() <= settings[-1].items()
    assert (found.num_images, found.num_captions, found.captions_alike) == (7, 9, 3)
    assert found == retrieval_recall(
      *vectors,
      np.array([0, 1, 2, 3, 4, 5, 6, 0, 1]),
      words.reshape(-1),
      identical_captions_right=alike,
    )
    assert found.text_to_image[1] < 1 == found.text_to_image[10]


@pytest.mark.parametrize(
  'change,message',
  [
    ({'class_names': NAMES[:3]}, "class_names .* 3 .*'digits' .* 10 "),
    (
      {'task': 'glyphs_core', 'split': 'train', 'class_names': None},
      "'train' .*max_examples",
    ),
  ],
)
def test_wrong_data_sets(change, message):
  evaluator, run = make()
  with pytest.raises(ValueError, match=message):
    evaluator.check(run, dataclasses.replace(DIGITS, **change))


def test_wrong_models_and_settings(fake_data):
  towers = types.SimpleNamespace(image_embeddings=None, text_embeddings=None)
  with pytest.raises(ValueError, match='SimpleNamespace .*class_log_prob'):
    zeroshot_datasets.check_model(towers, num_samples=2)
  evaluator, run = make(num_samples=2)
  fake_data(types.SimpleNamespace(splits={'test': 1}), {})
  with pytest.raises(ValueError, match="num_samples=2 .*'x'"):
    evaluator.check(run, ZeroShotDataset('x', 'x'))


def test_float32_products_are_not_lowered():
  lowered = jax.jit(zeroshot_datasets.similarity).lower(
    jnp.ones((2, 8), jnp.bfloat16), jnp.ones((3, 8))
  )
  assert 'HIGHEST' in lowered.as_text() and 'bf16' not in lowered.as_text().split('dot_general')[1]
