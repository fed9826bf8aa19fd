import unicodedata

import numpy as np
import pytest

from het_plugin.data import glyphs
from het_plugin.data.glyphs import GlyphSource

CORE = GlyphSource('core')


@pytest.mark.parametrize('split', ['train', 'shift'])
def test_examples_do_not_depend_on_the_batch_they_are_read_in(split):
  ids = np.arange(200, 330)
  images, labels = CORE.read(split, ids, 28, seed=3)
  assert images.shape == (130, 28, 28, 1) and images.dtype == np.float32
  assert labels.shape == (130, 1) and labels.dtype == np.int32
  assert images.min() >= -1 and images.max() <= 1
  for some in (ids[77:78], ids[::-1], ids[5:100:7]):
    some_images, some_labels = CORE.read(split, some, 28, seed=3)
    np.testing.assert_array_equal(some_images, images[some - 200])
    np.testing.assert_array_equal(some_labels, labels[some - 200])


def test_every_class_once_in_each_block():
  K = CORE.info.num_classes
  _, labels = CORE.read('train', np.arange(2 * K), 8, seed=0)
  for block in labels[:K, 0], labels[K:, 0]:
    np.testing.assert_array_equal(np.sort(block), np.arange(K))
  assert (labels[:K] != labels[K:]).mean() > 0.9


def test_train_depends_on_the_seed_and_finite_splits_do_not():
  ids = np.arange(64)
  for split, same in (('train', False), ('validation', True), ('shift', True)):
    images, labels = CORE.read(split, ids, 28, seed=0)
    other_images, other_labels = CORE.read(split, ids, 28, seed=1)
    assert np.array_equal(images, other_images) == same
    assert np.array_equal(labels, other_labels) == same


def test_full_draws_only_faces_that_have_the_class():
  """A class that one face has is drawn from that face: no blank or replacement glyphs."""
  source = GlyphSource('full')
  images, _ = source.read('validation', np.arange(1000), 28, seed=0)
  contrast = np.ptp(images, axis=(1, 2, 3))
  assert (contrast > 0.5).mean() > 0.99


def test_nearest_base_glyph_finds_the_class_more_often_than_not():
  """The labels belong to the pictures: a correlation with the un-augmented glyphs finds them."""
  source = GlyphSource('heldout')
  ids = np.arange(400)
  images, labels = source.read('test', ids, 28, seed=0)
  spec = glyphs.SPLITS['heldout']['test']
  bank = glyphs.glyph_bank.glyph_bank('heldout', spec.faces, 28)
  bank.draw()
  base = bank.images[:, 1:-1, 1:-1].reshape(len(bank.images), -1).astype(np.float32)

  def normalise(x):
    x = x - x.mean(axis=1, keepdims=True)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-6)

  nearest = (normalise(images.reshape(400, -1)) @ normalise(base).T).argmax(axis=1)
  predicted = np.searchsorted(bank.first, nearest, side='right') - 1
  # shifts of two pixels defeat a correlation often; chance is 1 / 1142
  assert (predicted == labels[:, 0]).mean() > 0.15


def test_names_are_those_of_the_characters_shown(split='train'):
  source = glyphs.GlyphNameSource('core')
  ids = np.arange(100, 150)
  images, captions = source.read(split, ids, 20, seed=4)
  same_images, labels = CORE.read(split, ids, 20, seed=4)
  np.testing.assert_array_equal(images, same_images)
  code_points = glyphs.glyph_bank.glyph_classes('core').code_points
  names = [unicodedata.name(chr(code_points[k])).lower() for k in labels[:, 0]]
  assert [list(several) for several in captions] == [[name] for name in names]
  assert source.info.splits == CORE.info.splits and source.info.channels == 1
