import numpy as np
import pytest
from scipy import special

from het_plugin.data import counter_random, glyph_bank, glyph_confusions, glyphs

SOURCE = glyphs.NoisyGlyphSource('core')


def test_nearest_agrees_with_all_pairs():
  rng = np.random.default_rng(0)
  images = np.zeros((40, 8, 8), np.uint8)
  images[:, 1:-1, 1:-1] = rng.integers(0, 256, (40, 6, 6))
  bank = glyph_bank.GlyphBank(images, np.arange(0, 41, 2), np.tile([0, 1], 20))
  got = glyph_confusions.nearest(bank, 5)
  x = images[:, 1:-1, 1:-1].reshape(40, 3, 2, 3, 2).mean((2, 4)).reshape(40, 9) / 255
  for row in range(40):
    others = np.arange(row % 2, 40, 2)
    distance = np.square(x[others] - x[row]).sum(1)
    near = np.argsort(distance)[:5]
    np.testing.assert_array_equal(got.classes[row], others[near] // 2)
    np.testing.assert_allclose(got.squared_distance[row], distance[near], atol=1e-12)


@pytest.mark.slow
def test_distribution_is_the_softmax_of_the_squared_distances():
  ids = np.arange(300, 340)
  classes, p = SOURCE.label_distribution('validation', ids)
  _, true = glyphs.GlyphSource('core').read('validation', ids, 8, 0)
  np.testing.assert_array_equal(classes[:, :1], true)
  assert (np.sort(classes, axis=1)[:, 1:] != np.sort(classes, axis=1)[:, :-1]).all()
  _, _, rows, keys = SOURCE._draw('validation', ids, 28, 0)
  squared = glyph_confusions.lookalikes('core', glyph_bank.DEJAVU_FACES).squared_distance[rows]
  u = counter_random.uniform(keys, 10).astype(np.float64)
  h = glyph_confusions.READER_NOISE * (0.5 + u[:, 8]) / (0.5 + 0.5 * u[:, 7])
  np.testing.assert_allclose(
    p, special.softmax(-squared / (2 * h[:, None] ** 2), axis=1), rtol=1e-12
  )


@pytest.mark.slow
def test_true_classes_and_readers_who_look_closer():
  mild = glyphs.SOURCES['glyphs_noisy_mild']
  ids = np.arange(300, 1300)
  _, true = glyphs.GlyphSource('core').read('validation', ids, 8, 0)
  np.testing.assert_array_equal(mild.info.true_classes('validation', ids), true[:, 0])
  _, p = SOURCE.label_distribution('validation', ids)
  _, mild_p = mild.label_distribution('validation', ids)
  assert (mild_p[:, 0] >= p[:, 0]).all()
  assert 1 - mild_p[:, 0].mean() == pytest.approx(0.2, abs=0.02)
  _, labels = mild.read('validation', ids, 8, 0)
  assert (labels != true).mean() == pytest.approx(1 - mild_p[:, 0].mean(), abs=0.04)


def test_labels_are_drawn_from_the_distribution():
  ids = np.arange(SOURCE.info.splits['validation'])
  classes, p = SOURCE.label_distribution('validation', ids)
  images, labels = SOURCE.read('validation', ids, 8, seed=0)
  drawn = classes == labels  # [N, C]
  assert (drawn.sum(1) == 1).all()
  error = np.sqrt((p * (1 - p)).sum(0))
  assert (np.abs(drawn.sum(0) - p.sum(0)) < 4 * error).all()
  # where the own class is unlikely, other labels are as frequent as they should be
  hard = p[:, 0] < 0.3
  assert hard.sum() > 500
  assert drawn[hard, 0].mean() == pytest.approx(p[hard, 0].mean(), abs=0.04)
  true_images, _ = glyphs.GlyphSource('core').read('validation', ids[:50], 8, 0)
  np.testing.assert_array_equal(images[:50], true_images)


@pytest.mark.parametrize('split', ['train', 'validation'])
def test_labels_depend_on_neither_the_batch_nor_the_side_of_the_images(split):
  ids = np.arange(200, 264)
  _, labels = SOURCE.read(split, ids, 8, seed=3)
  for some in (ids[7:8], ids[::-1]):
    _, some_labels = SOURCE.read(split, some, 12, seed=3)
    np.testing.assert_array_equal(some_labels, labels[some - 200])
  _, others = SOURCE.read(split, ids, 8, seed=4)
  assert np.array_equal(others, labels) == (split != 'train')
