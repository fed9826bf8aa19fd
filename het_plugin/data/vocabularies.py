"""Converts texts to token ids: bytes, a SentencePiece model, or the tokenizer of a published text
tower. Ids are those of seqio's vocabularies; a vocabulary of seqio is one here, too.
"""

import importlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath

from het_plugin.data.annotations import END, PADDING, token_rows
from het_plugin.data.locked_cache import locked_cache
from het_plugin.data.sources import Vocabulary

BYTES = 'bytes'
TOKENIZER = 'tokenizer.json'
_NUM_SPECIAL = 3  # of bytes: padding, end-of-sequence and unknown


class ByteVocabulary:
  """The bytes of UTF-8, after 3 special ids."""

  vocab_size = _NUM_SPECIAL + 256
  eos_id = END

  def encode(self, s: str) -> list[int]:
    return [byte + _NUM_SPECIAL for byte in s.encode()]

  def decode(self, ids: Iterable[int]) -> str:
    tokens = (i - _NUM_SPECIAL for i in _before_end(ids) if _NUM_SPECIAL <= i < self.vocab_size)
    return bytes(tokens).decode(errors='ignore')


_OF_BYTES = ByteVocabulary()  # of None and 'bytes'


class SentencePieceVocabulary:
  """A SentencePiece model whose padding is id 0 and whose end-of-sequence is id 1."""

  eos_id = END

  def __init__(self, path: str):
    """ValueError if the library is missing, the file is no model, or has other special ids."""
    sentencepiece = _library('sentencepiece', path)
    try:
      self._model = sentencepiece.SentencePieceProcessor(model_proto=epath.Path(path).read_bytes())
    except Exception as error:  # the type depends on the version
      raise ValueError(f'vocabulary is {path!r}; it is not a SentencePiece model.') from error
    ids = self._model.pad_id(), self._model.eos_id()
    if ids != (PADDING, END):
      raise ValueError(
        f'vocabulary is {path!r}; its ids of padding and end-of-sequence are {ids} and must be '
        f'{(PADDING, END)}: train it with pad_id=0, eos_id=1, unk_id=2, bos_id=-1.'
      )
    self.path = path

  @property
  def vocab_size(self) -> int:
    return self._model.get_piece_size()

  def encode(self, s: str) -> list[int]:
    return self._model.encode(s)

  def decode(self, ids: Iterable[int]) -> str:
    # A table of embeddings that was rounded up has rows without a piece: unknown, as in seqio.
    unknown = self._model.unk_id()
    return self._model.decode([i if i < self.vocab_size else unknown for i in _before_end(ids)])


class TokenizerFile:
  """The tokenizer of a published text tower, a tokenizer.json of the tokenizers library.

  Ids are theirs + 2, after padding (0) and end-of-sequence (1), which the tower has as rows of its
  own (`weights.read_text_tower`). A start-of-sequence that the tokenizer adds is kept.
  """

  eos_id = END

  def __init__(self, path: str):
    """ValueError if the tokenizers library is not installed, or the file cannot be read."""
    tokenizers = _library('tokenizers', path)
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
  def vocab_size(self) -> int:
    return self._largest + 1 + 2

  def encode(self, s: str) -> list[int]:
    ids = self._tokenizer.encode(s).ids
    return [i + 2 for i in (ids[:-1] if ids and ids[-1] == self._end else ids)]

  def decode(self, ids: Iterable[int]) -> str:
    return self._tokenizer.decode([i - 2 for i in _before_end(ids) if i > END])


def _library(name: str, path: str) -> Any:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
      f'vocabulary is {path!r}; reading it needs a library: pip install {name}'
    ) from error


def _before_end(ids: Iterable[int]) -> list[int]:
  return list(itertools.takewhile(lambda i: i != END, map(int, ids)))


def get_vocabulary(name: str | Vocabulary | None = None) -> Vocabulary:
  """The vocabulary with a name, the same object for the same name; or `name` itself if it is one.

  Names are 'bytes' (`ByteVocabulary`: 259 ids; also None), and the paths of a SentencePiece model,
  which ends in .model, and of a tokenizer.json (`TokenizerFile`).

  Raises:
    ValueError: the name is unknown, the file does not exist, or the model's padding is not id 0 or
      its end-of-sequence not id 1.
  """
  return _named(name) if name is None or not hasattr(name, 'eos_id') else name


@locked_cache
def _named(name: Any) -> Vocabulary:
  if name in (None, BYTES):
    return _OF_BYTES
  if not isinstance(name, str) or not name.endswith(('.model', TOKENIZER)):
    raise ValueError(
      f'vocabulary is {name!r}; it must be {BYTES!r} or the path of a .model file or a {TOKENIZER}.'
    )
  if not epath.Path(name).exists():
    raise ValueError(f'vocabulary is {name!r}; there is no such file.')
  return TokenizerFile(name) if name.endswith(TOKENIZER) else SentencePieceVocabulary(name)


def vocabulary_name(vocabulary: Vocabulary) -> str:
  """The name of a vocabulary in get_vocabulary, or another description of it."""
  if type(vocabulary).__name__ == 'ByteVocabulary':  # seqio's is the same
    return BYTES
  of_seqio = getattr(vocabulary, 'sentencepiece_model_file', None)
  return getattr(vocabulary, 'path', of_seqio) or str(vocabulary)


def tokenize(vocabulary: str | Vocabulary | None, texts: Sequence[str], length: int) -> np.ndarray:
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
