"""Converts texts to token ids with seqio's vocabularies: bytes, a SentencePiece model, or the
tokenizer of a published text tower.
"""

from collections.abc import Sequence

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from het_plugin.data.annotations import END, PADDING, token_rows
from het_plugin.data.locked_cache import locked_cache

BYTES = 'bytes'
TOKENIZER = 'tokenizer.json'
_OF_BYTES = seqio.ByteVocabulary()


class TokenizerFile(seqio.Vocabulary):
  """The tokenizer of a published text tower, a tokenizer.json of the tokenizers library.

  Ids are theirs + 2, after padding (0) and end-of-sequence (1), which the tower has as rows of its
  own (`weights.read_text_tower`). A start-of-sequence that the tokenizer adds is kept.
  """

  def __init__(self, path: str):
    """ValueError if the tokenizers library is not installed, or the file cannot be read."""
    super().__init__()
    try:
      import tokenizers
    except ImportError as error:
      raise ValueError(
        f'vocabulary is {path!r}; reading it needs a library: pip install tokenizers'
      ) from error
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises Exception itself
      raise ValueError(f'vocabulary is {path!r}; it is not a tokenizer file: {error}') from error
    self._tokenizer.no_padding()
    self._tokenizer.no_truncation()
    self._largest = max(self._tokenizer.get_vocab().values(), default=-1)  # ids may have gaps
    self._end = (self._tokenizer.encode('').ids or [None])[-1]
    self.path = path

  @property
  def eos_id(self) -> int:
    return END

  @property
  def unk_id(self) -> int | None:
    return None

  @property
  def _base_vocab_size(self) -> int:
    return self._largest + 1 + 2

  def _encode(self, s: str) -> list[int]:
    ids = self._tokenizer.encode(s).ids
    return [i + 2 for i in (ids[:-1] if ids and ids[-1] == self._end else ids)]

  def _decode(self, ids: Sequence[int]) -> str:
    return self._tokenizer.decode([i - 2 for i in ids if i > END])

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    encode = lambda text: np.asarray(self._encode(text.decode()), np.int32)  # noqa: E731
    return tf.ensure_shape(tf.numpy_function(encode, [s], tf.int32), [None])

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    return tf.numpy_function(lambda row: self._decode(row.tolist()).encode(), [ids], tf.string)


def get_vocabulary(name: str | seqio.Vocabulary | None = None) -> seqio.Vocabulary:
  """The vocabulary with a name, the same object for the same name; or `name` itself if it is one.

  Names are 'bytes' (seqio.ByteVocabulary: the bytes of UTF-8 and 3 special ids, 259 in all; also
  None), and the paths of a SentencePiece model, which ends in .model, and of a tokenizer.json
  (`TokenizerFile`).

  Raises:
    ValueError: the name is unknown, the file does not exist, or the model's padding is not id 0 or
      its end-of-sequence not id 1.
  """
  return name if isinstance(name, seqio.Vocabulary) else _named(name)


@locked_cache
def _named(name: str | None) -> seqio.Vocabulary:
  if name in (None, BYTES):
    return _OF_BYTES
  if not isinstance(name, str) or not name.endswith(('.model', TOKENIZER)):
    raise ValueError(
      f'vocabulary is {name!r}; it must be {BYTES!r} or the path of a .model file or a {TOKENIZER}.'
    )
  if not epath.Path(name).exists():
    raise ValueError(f'vocabulary is {name!r}; there is no such file.')
  if name.endswith(TOKENIZER):
    return TokenizerFile(name)
  vocabulary = seqio.SentencePieceVocabulary(name)
  try:
    tokenizer = vocabulary.tokenizer
  except Exception as error:  # protobuf's or SentencePiece's type, depending on their versions
    raise ValueError(f'vocabulary is {name!r}; it is not a SentencePiece model.') from error
  # Read from the model itself, because seqio's `pad_id` is always 0.
  ids = tokenizer.pad_id(), tokenizer.eos_id()
  if ids != (PADDING, END):
    raise ValueError(
      f'vocabulary is {name!r}; its ids of padding and end-of-sequence are {ids} and must be '
      f'{(PADDING, END)}: train it with pad_id=0, eos_id=1, unk_id=2, bos_id=-1.'
    )
  return vocabulary


def vocabulary_name(vocabulary: seqio.Vocabulary) -> str:
  """The name of a vocabulary in get_vocabulary, or another description of it."""
  if isinstance(vocabulary, seqio.ByteVocabulary):
    return BYTES
  if isinstance(vocabulary, TokenizerFile):
    return vocabulary.path
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    return vocabulary.sentencepiece_model_file
  return str(vocabulary)


def tokenize(
  vocabulary: str | seqio.Vocabulary | None, texts: Sequence[str], length: int
) -> np.ndarray:
  """Token ids for a text tower, int32 [N, L].

  Every row has the tokens of a text, then end-of-sequence (1), then padding (0). A text of L or
  more tokens is cut so that it still ends with 1. An empty text is a single 1. Texts are neither
  lower-cased nor stripped. `vocabulary` is as in get_vocabulary.

  Raises:
    ValueError: the vocabulary does not exist, L is below 2, or texts is a single string.
  """
  if isinstance(texts, str):
    raise ValueError(f'texts is {texts!r}; it must be a sequence of strings.')
  if length < 2:
    raise ValueError(f'length is {length}; it must be at least 2: a token and end-of-sequence.')
  vocabulary = get_vocabulary(vocabulary)
  return token_rows([vocabulary.encode(text) for text in texts], length)
