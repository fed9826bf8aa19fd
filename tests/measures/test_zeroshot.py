"""Zero-shot numerics against sorting in numpy, and small cases."""

import numpy as np
import pytest
import scipy.sparse
import scipy.stats

from het_plugin.measures import zeroshot
from het_plugin.measures.zeroshot import retrieval_recall


def sorted_hits(scores, right, k):
  """The mean over random orders of equal scores, by counting: [N]."""
  found = []
  for score, is_right in zip(scores, right, strict=True):
    if not is_right.any():
      found.append(0.0)
      continue
    own = score[is_right].max()
    places = k - (score > own).sum()
    tied = score == own
    none = scipy.stats.hypergeom(tied.sum(), (tied & is_right).sum(), min(places, tied.sum()))
    found.append(1 - none.pmf(0) if places > 0 else 0.0)
  return np.array(found)


@pytest.mark.parametrize('levels', [3, 10**6])  # nearly all tied, nearly none
def test_hits_are_those_of_sorting(levels, shape=(57, 31)):
  rng = np.random.default_rng(0)
  scores = rng.integers(0, levels, shape).astype(np.float32)
  right = rng.random(shape) < 0.3
  right[0] = True
  right[-1] = False
  found = zeroshot.hit_rates(scores, right, (1, 5))
  expected = [sorted_hits(scores, right, k) for k in (1, 5)]
  np.testing.assert_allclose(found, np.stack(expected, 1), atol=1e-6)
  order = rng.permutation(shape[1])
  np.testing.assert_allclose(zeroshot.hit_rates(scores[:, order], right[:, order], (1, 5)), found)


def test_what_is_no_number_does_not_help():
  nan = np.nan
  inf = np.inf
  scores = np.array([[nan, 1, 2], [1, nan, 2], [nan, nan, nan], [-inf, 0, 0], [inf, inf, 1]], 'f')
  right = np.eye(3, dtype=bool)[[0, 0, 1, 0, 1]]
  # NaN itself is never right; one that is wrong stands before
  found = zeroshot.hit_rates(scores, right, (1, 2, 3))
  expected = [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1], [0.5, 1, 1]]
  np.testing.assert_array_equal(found, expected)
  both = np.array([[True, True, False]])
  assert zeroshot.hit_rates(np.array([[nan, 1, 2]], 'f'), both, (3,))[0] == 0


def test_the_class_with_most_votes_is_right():
  label = np.array([[2, 0, 2], [1, 0, -1], [-1, -1, -1]])
  scores = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 0.5], [0.0, 0.0, 0.0]])
  found = zeroshot.class_hit_rates(scores, label, None, (1, 2))
  np.testing.assert_allclose(found, [[1, 1], [0.5, 0.5], [0, 0]])  # a tie is half of each class
  weight = np.array([[0.1, 0.8, 0.1], [0.6, 0.4, 0], [0, 0, 0]])
  found = zeroshot.class_hit_rates(scores, label, weight, (1, 2))
  np.testing.assert_allclose(found, [[0, 0], [0, 0], [0, 0]])


@pytest.mark.parametrize('elements', [1, 500])
def test_blocks_give_the_same_hits(elements, monkeypatch):
  monkeypatch.setattr(zeroshot, '_BLOCK_ELEMENTS', elements)
  rng = np.random.default_rng(2)
  queries = rng.integers(-2, 3, (53, 4)).astype(np.float32)  # exact in float32, full of ties
  candidates = rng.integers(-2, 3, (29, 4)).astype(np.float32)
  right = rng.random((53, 29)) < 0.1
  found = zeroshot.embedding_hit_rates(queries, candidates, scipy.sparse.csr_array(right), (5,))
  expected = sorted_hits(queries @ candidates.T, right, 5)
  np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)


def test_equal_candidates_tie_whatever_the_matrix_product_rounds():
  rng = np.random.default_rng(3)
  one = rng.normal(size=(1, 257)).astype(np.float32)
  candidates = np.repeat(one, 37, axis=0)
  queries = rng.normal(size=(37, 257)).astype(np.float32)
  right = scipy.sparse.csr_array(np.eye(37, dtype=bool))
  found = zeroshot.embedding_hit_rates(queries, candidates, right, (1, 37))
  np.testing.assert_allclose(found, np.tile([1 / 37, 1], (37, 1)), rtol=1e-5)


def tokenize(texts):
  """Letters as ids."""
  rows = np.zeros((len(texts), 24), np.int32)
  for row, text in zip(rows, texts, strict=True):
    row[: len(text[:24])] = [ord(c) for c in text[:24]]
  return rows


def embedding_of(tokens):
  return np.stack([np.sin((i + 1) * tokens).sum(axis=1) for i in range(5)], axis=1) + tokens[:, :5]


def test_class_embeddings_are_normalised_means_of_normalised_texts():
  names = ['cat', 'dog', 'bird', 'dog']
  templates = ('{}', 'one {}.', 'the {} there')
  tokens = [tokenize([t.replace('{}', name) for name in names]) for t in templates]
  found, alike = zeroshot.class_embeddings(embedding_of, tokens)
  assert found.dtype == np.float32 and alike == 1
  for name, row in zip(names, found, strict=True):
    texts = embedding_of(tokenize([t.replace('{}', name) for t in templates]))
    mean = (texts / np.linalg.norm(texts, axis=1, keepdims=True)).mean(axis=0)
    np.testing.assert_allclose(row, mean / np.linalg.norm(mean), rtol=1e-5, atol=1e-6)
  assert (found[1] == found[3]).all()


@pytest.mark.parametrize('value', [0.0, np.nan, np.inf])
def test_embeddings_without_direction_are_refused(value):
  def embed(tokens):
    return np.where(np.arange(len(tokens))[:, None] == 1, value, np.ones((len(tokens), 3)))

  with pytest.raises(ValueError, match='embedding of text 1 '):
    zeroshot.class_embeddings(embed, [tokenize(['a', 'b'])])


def brute_recall(images, captions, owner, same_text, k):
  """By sorting all scores; right[m, n] says whether caption m is right for image n."""
  right = np.zeros((len(captions), len(images)), bool)
  for m, n in enumerate(owner):
    right[m, n] = True
    if same_text is not None:
      right[same_text == same_text[m], n] = True
  scores = images @ captions.T
  to_text = sorted_hits(scores, right.T, k)[np.unique(owner)]
  return to_text.mean(), sorted_hits(scores.T, right, k).mean()


@pytest.mark.parametrize('alike', [False, True])
def test_recall_against_sorting(alike, N=20, M=71):
  rng = np.random.default_rng(4)
  images = rng.integers(-3, 4, (N, 3)).astype(np.float32)
  text = rng.integers(0, max(1, M // 2), M)
  captions = rng.integers(-3, 4, (M, 3)).astype(np.float32)[text]
  owner = np.concatenate([np.arange(N), rng.integers(0, N, M - N)])
  found = retrieval_recall(images, captions, owner, text, identical_captions_right=alike)
  assert (found.num_images, found.num_captions) == (N, M)
  assert found.captions_alike == M - len(set(text.tolist()))
  for k in (1, 5, 10):
    to_text, to_image = brute_recall(images, captions, owner, text if alike else None, k)
    assert found.image_to_text[k] == pytest.approx(to_text, abs=1e-6)
    assert found.text_to_image[k] == pytest.approx(to_image, abs=1e-6)


def test_images_without_captions_are_candidates_only():
  images = np.array([[1, 0], [0.9, 0.1], [0, 1]], np.float32)
  captions = np.array([[2, 0.5], [0, 1]], np.float32)
  found = retrieval_recall(images, captions, np.array([1, 2]), np.arange(2), ks=(1, 2))
  assert found.text_to_image == {1: 0.5, 2: 1.0}  # image 0 stands before image 1
  assert found.image_to_text == {1: 1.0, 2: 1.0}  # of images 1 and 2
