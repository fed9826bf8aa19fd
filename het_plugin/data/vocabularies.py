"""Converts texts to token ids with seqio's vocabularies: bytes or a SentencePiece model."""

from collections.abc import Sequence

import numpy as np
import seqio
from etils import epath

from het_plugin.data.annotations import END, PADDING, token_rows
from het_plugin.data.locked_cache import locked_cache

BYTES = 'bytes'


def get_vocabulary(name: str | None = None) -> seqio.Vocabulary:
  """The vocabulary with a name; the same object for the same name.

  Args:
    name: 'bytes' (seqio.ByteVocabulary: the bytes of UTF-8 and 3 special ids, 259 in all), or the
      path of a SentencePiece model, which ends in .model. None: 'bytes'.

  Raises:
    ValueError: the name is unknown, the file does not exist, or the model's padding is not id 0 or
      its end-of-sequence not id 1.
  """
  if name is not None and not isinstance(name, str):
    raise ValueError(f'vocabulary is {name!r}; it must be {BYTES!r} or the path of a .model file.')
  return _load(BYTES if name is None else name)


@locked_cache
def _load(name: str) -> seqio.Vocabulary:
  if name == BYTES:
    return seqio.ByteVocabulary()
  if not name.endswith('.model'):
    raise ValueError(f'vocabulary is {name!r}; it must be {BYTES!r} or the path of a .model file.')
  if not epath.Path(name).exists():
    raise ValueError(f'vocabulary is {name!r}; there is no such file.')
  vocabulary = seqio.SentencePieceVocabulary(name)
  try:
    tokenizer = vocabulary.tokenizer
  except Exception as error:  # protobuf's or SentencePiece's type, depending on their versions
    raise ValueError(f'vocabulary is {name!r}; it is no SentencePiece model.') from error
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
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    return vocabulary.sentencepiece_model_file
  return str(vocabulary)


def tokenize(
  vocabulary: str | seqio.Vocabulary | None, texts: Sequence[str], length: int
) -> np.ndarray:
  """Token ids for a text tower, int32 [N, L].

  Every row has the tokens of a text, then end-of-sequence (1), then padding (0). A text of L or
  more tokens is cut so that it still ends with 1. An empty text is a single 1.

  Args:
    vocabulary: a name as in get_vocabulary, or a vocabulary.
    texts: N texts; they are neither lower-cased nor stripped.
    length: L.

  Raises:
    ValueError: the vocabulary does not exist, L is below 2, or texts is a single string.
  """
  if isinstance(texts, str):
    raise ValueError(f'texts is {texts!r}; it must be a sequence of strings.')
  if length < 2:
    raise ValueError(f'length is {length}; it must be at least 2: a token and end-of-sequence.')
  if vocabulary is None or isinstance(vocabulary, str):
    vocabulary = get_vocabulary(vocabulary)
  return token_rows([vocabulary.encode(text) for text in texts], length)
