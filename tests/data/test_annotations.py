import numpy as np
import pytest
import seqio

from het_plugin.data import counter_random, get_vocabulary
from het_plugin.data.annotations import Captions, Labels, with_fields
from het_plugin.rows.labels import check_weights

KEYS = counter_random.fold(counter_random.base_key(0), np.arange(1000))


def captions(length=8, at_random=False, vocabulary=None):
  return Captions(vocabulary or get_vocabulary(), length, at_random)


def texts_of(rows):
  return [get_vocabulary().decode(row.tolist()) for row in rows]


def test_labels_are_padded():
  features, problems = Labels(3).rows(np.array([[1, 2], [3, -1]], np.int32), KEYS[:2])
  rows = features['label']
  np.testing.assert_array_equal(rows, [[1, 2, -1], [3, -1, -1]])
  assert rows.dtype == np.int32 and problems == [None, None]
  with pytest.raises(ValueError, match=r"\['label'\] is 1; .* 2 labels"):
    Labels(1).rows(np.array([[1, 2]]), KEYS[:1])


def test_labels_with_weights_are_padded_with_zeros():
  label = np.array([[1, 2], [3, -1]], np.int32)
  label_weight = np.array([[0.75, 0.25], [1, 0]])
  weight = np.array([1.0, 2.0])
  check_weights('here', label_weight, weight, label >= 0)
  given = with_fields(label, label_weight=label_weight, weight=weight)
  features, _ = Labels(3, ('label_weight', 'weight')).rows(given, KEYS[:2])
  np.testing.assert_array_equal(features['label_weight'], [[0.75, 0.25, 0], [1, 0, 0]])
  np.testing.assert_array_equal(features['weight'], weight)
  with pytest.raises(ValueError, match='here: .*weights of example 1 .* nan'):
    check_weights('here', np.array([[1, 0], [np.nan, 0]]), None, label >= 0)
  with pytest.raises(ValueError, match='here: weight of example 0 is -1.0'):
    check_weights('here', None, -weight, label >= 0)


def test_training_draws_each_caption_equally_often_by_key():
  several = [('a', ' ', 'b', 'c')] * 1000
  rows = captions(at_random=True).rows(several, KEYS)[0]['text']
  letters = texts_of(rows)
  counts = [letters.count(letter) for letter in 'abc']
  assert sum(counts) == 1000
  # each is binomial: 333 +- 15
  assert max(abs(count - 1000 / 3) for count in counts) < 60
  some = [3, 999, 0]
  other = captions(at_random=True).rows([several[0]] * 3, KEYS[some])[0]['text']
  np.testing.assert_array_equal(other, rows[some])


def test_missing_captions():
  given = [(), ('',), ('\t\n', ' '), ('\ud800',), ('fine',)]
  for at_random in (False, True):
    rows, problems = captions(at_random=at_random).rows(given, KEYS[:5])
    assert problems[:3] == ['its caption is missing or empty'] * 3
    assert problems[3:] == ['its caption is not valid UTF-8', None]
    assert texts_of(rows['text'][4:]) == ['fine']


def test_a_caption_without_tokens(sentencepiece_model):
  """SentencePiece's normaliser takes some characters for nothing at all."""
  vocabulary = seqio.SentencePieceVocabulary(sentencepiece_model)
  assert not vocabulary.encode('\u200b')
  _, problems = captions(vocabulary=vocabulary).rows([('\u200b',)], KEYS[:1])
  assert problems == ['its caption has no tokens in the vocabulary']
