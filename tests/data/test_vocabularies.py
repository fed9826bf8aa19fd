import numpy as np
import pytest
import sentencepiece
import seqio

from het_plugin.data import get_vocabulary, tokenize


def test_bytes_need_no_file():
  vocabulary = get_vocabulary()
  assert vocabulary is get_vocabulary('bytes') is get_vocabulary(None)
  of_seqio = seqio.ByteVocabulary()
  assert vocabulary.vocab_size == of_seqio.vocab_size == 259
  text = 'größer \N{GRINNING FACE}'
  assert vocabulary.encode(text) == of_seqio.encode(text)
  for ids in ([100, 101, 1, 102], [0, 2, 5], [*vocabulary.encode(text)[:-1], 300]):
    assert vocabulary.decode(ids) == of_seqio.decode(ids)
  np.testing.assert_array_equal(
    tokenize('bytes', ['ab', 'é'], 5), [[100, 101, 1, 0, 0], [0xC3 + 3, 0xA9 + 3, 1, 0, 0]]
  )


def test_sentencepiece_model(sentencepiece_model):
  vocabulary = get_vocabulary(sentencepiece_model)
  assert vocabulary is get_vocabulary(sentencepiece_model) and vocabulary.vocab_size == 60
  texts = ['latin small letter e with acute', 'plus sign']
  rows = tokenize(sentencepiece_model, texts, 32)
  assert rows.shape == (2, 32) and rows.dtype == np.int32
  processor = sentencepiece.SentencePieceProcessor(model_file=sentencepiece_model)
  for row, text in zip(rows, texts, strict=True):
    expected = [*processor.encode(text), 1]
    np.testing.assert_array_equal(row, expected + [0] * (32 - len(expected)))
    assert vocabulary.decode(row.tolist()) == text
  beyond = [*processor.encode('plus'), 60, 999]
  of_seqio = seqio.SentencePieceVocabulary(sentencepiece_model)
  assert vocabulary.decode(beyond) == of_seqio.decode(beyond)


def test_tokenizer_of_a_published_tower(tmp_path):
  tokenizers = pytest.importorskip('tokenizers')
  words = {'<s>': 0, 'a': 1, 'bird': 2, '</s>': 3, 'wren': 9}
  theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token='a'))
  theirs.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  theirs.post_processor = tokenizers.processors.TemplateProcessing(
    single='<s> $A </s>', special_tokens=[('<s>', 0), ('</s>', 3)]
  )
  path = str(tmp_path / 'tokenizer.json')
  theirs.save(path)
  np.testing.assert_array_equal(
    tokenize(path, ['a bird', 'bird'], 6), [[2, 3, 4, 1, 0, 0], [2, 4, 1, 0, 0, 0]]
  )
  # Ids may have gaps.
  assert get_vocabulary(path).vocab_size == 1 + tokenize(path, ['wren'], 6).max()


def test_rows_end_with_end_of_sequence_however_long_the_text(length=4):
  rows = tokenize(get_vocabulary(), ['', 'a', 'abc', 'abcd', 'abcdefgh' * 9], length)
  assert rows.shape == (5, length) and rows.dtype == np.int32
  for row, size in zip(rows, [0, 1, 3, 4, 72], strict=True):
    end = min(size, length - 1)
    np.testing.assert_array_equal(row[:end], 100 + np.arange(end))
    assert row[end] == 1 and not row[end + 1 :].any()


def test_errors(tmp_path):
  with pytest.raises(ValueError, match="vocabulary is 'words'; .*'bytes'"):
    get_vocabulary('words')
  with pytest.raises(ValueError, match="vocabulary is '/nowhere/x.model'"):
    get_vocabulary('/nowhere/x.model')
  (tmp_path / 'no.model').write_text('this is no model')
  with pytest.raises(ValueError, match=r'no.model.; .*SentencePiece'):
    get_vocabulary(str(tmp_path / 'no.model'))
  with pytest.raises(ValueError, match="texts is 'a cat'"):
    tokenize('bytes', 'a cat', 8)


def test_a_model_with_other_special_ids(tmp_path):
  """SentencePiece's own default has no padding, and end-of-sequence as 2."""
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(['some words to learn from', 'and others'] * 20),
    model_prefix=str(tmp_path / 'default'),
    vocab_size=18,
    minloglevel=2,
  )
  with pytest.raises(ValueError, match=r'\(-1, 2\) .*\(0, 1\): .*pad_id=0'):
    get_vocabulary(str(tmp_path / 'default.model'))
