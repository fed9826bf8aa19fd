"""Class labels or captions of the images of a batch, as rows of fixed length."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from het_plugin.data import counter_random

if TYPE_CHECKING:  # seqio imports TensorFlow, which labels do not need
  import seqio

PADDING, END = 0, 1  # seqio's token ids, the same in all supported vocabularies
_CAPTION_STREAM = 2**34  # folded into an example's key


class Labels:
  """The feature 'label': class numbers, int32 [B, L], padded with -1."""

  feature = 'label'
  padding = -1
  noun = 'image'

  def __init__(self, length: int):
    self.length = length

  def rows(self, labels: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, list[str | None]]:
    """Labels int32 [B, l] as a source reads them, padded to L.

    Returns:
      rows: int32 [B, L].
      problems: [B], None for each example.

    Raises:
      ValueError: there is an example with more than L labels.
    """
    del keys
    if labels.shape[1] > self.length:
      raise ValueError(
        f"task_feature_lengths['label'] is {self.length}; there is an example with "
        f'{labels.shape[1]} labels.'
      )
    rows = np.full((len(labels), self.length), self.padding, np.int32)
    rows[:, : labels.shape[1]] = labels
    return rows, [None] * len(labels)


class Captions:
  """The feature 'text': token ids of one caption per image, int32 [B, L]; see `tokenize`.

  If an image has several captions, training draws one with the example's key, so that epochs show
  different ones, and evaluation takes the first. Blank captions count as missing. The first caption
  that is cut to L tokens is logged.
  """

  feature = 'text'
  padding = PADDING
  noun = 'image-text pair'

  def __init__(self, vocabulary: 'seqio.Vocabulary', length: int, at_random: bool):
    """
    Args:
      vocabulary: of the token ids.
      length: L.
      at_random: whether one of several captions is chosen at random.
    """
    self._vocabulary = vocabulary
    self.length = length
    self._at_random = at_random
    self._has_cut = False

  def rows(
    self, captions: Sequence[Sequence[str]], keys: np.ndarray
  ) -> tuple[np.ndarray, list[str | None]]:
    """Token ids of one caption of each example.

    Args:
      captions: [B], the captions of each example.
      keys: uint64 [B], the random key of each example.

    Returns:
      rows: int32 [B, L]; the content is arbitrary for examples with a problem.
      problems: [B], None, or the reason why the example has no text.
    """
    draws = counter_random.fold(keys, _CAPTION_STREAM)
    ids, problems = [], []
    for several, draw in zip(captions, draws.tolist(), strict=True):
      several = [caption for caption in several if caption.strip()]
      caption = several[draw % len(several) if self._at_random else 0] if several else ''
      tokens = self._tokens(caption)
      ids.append(tokens or [])
      problems.append(_problem(caption, tokens))
    too_long = [len(tokens) for tokens in ids if len(tokens) >= self.length]
    if too_long and not self._has_cut:
      self._has_cut = True
      logging.getLogger(__name__).warning(
        "Captions are cut to task_feature_lengths['text'] = %d tokens; one has %d and its end.",
        *(self.length, too_long[0]),
      )
    return token_rows(ids, self.length), problems

  def _tokens(self, caption: str) -> Sequence[int] | None:
    """Token ids; None if the text cannot be encoded in UTF-8."""
    try:
      caption.encode()
    except UnicodeEncodeError:
      return None
    return self._vocabulary.encode(caption)


def _problem(caption: str, tokens: Sequence[int] | None) -> str | None:
  if not caption:
    return 'its caption is missing or empty'
  if tokens is None:
    return 'its caption is not valid UTF-8'
  return None if len(tokens) else 'its caption has no tokens in the vocabulary'


def token_rows(ids: Sequence[Sequence[int]], length: int) -> np.ndarray:
  """Token ids without end-of-sequence as rows: cut to fit, then END, then PADDING.

  Returns:
    int32 [N, length].
  """
  rows = np.full((len(ids), length), PADDING, np.int32)
  for row, tokens in zip(rows, ids, strict=True):
    count = min(len(tokens), length - 1)
    row[:count] = tokens[:count]
    row[count] = END
  return rows
