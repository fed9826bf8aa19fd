"""Class labels or captions of the images of a batch, as rows of fixed length."""

import logging
from collections.abc import Sequence

import numpy as np

from het_plugin.data import counter_random
from het_plugin.data.sources import Vocabulary

PADDING = 0
END = 1  # seqio's token ids, the same in all supported vocabularies
LABEL_FIELDS = 'label_weight', 'weight', 'annotator'  # what labels may have, see `Labels`
# Features that have a column for each label; a mixed image has those of both images.
OF_EACH_LABEL = frozenset({'label', 'label_weight', 'annotator', 'label_count'})
_CAPTION_STREAM = 2**34  # folded into an example's key


Features = dict[str, tuple[tuple[int, ...], type, int]]  # shape of a row, dtype, padding
Columns = tuple[dict[str, np.ndarray], list[str | None]]


class Labels:
  """Class labels.

  label: class numbers, int32 [B, L], padded with -1.
  label_weight: float32 [B, L], for soft labels: the probability of each class, or the share of the
    annotators who chose it.
  weight: float32 [B], the weight of each example in the training loss, if the source has one.
  annotator: int32 [B, L], for votes: who gave each, by the number in TaskInfo.annotators; -1 for
    none. The models here do not read it.
  label_count: float32 [B, L], where images with several labels of equal weight are mixed: how many
    labels the image of each label has, over how often it has this one. `label_weight` sums to 1
    there, as the target of a softmax must; times `label_count` it is the share of the image, with
    which a sigmoid has the class on.
  """

  noun = 'image'

  def __init__(self, length: int, fields: Sequence[str] = ()):
    """`length` is L, `fields` are the features besides 'label'."""
    self.length = length
    known = {
      'label_weight': ((length,), np.float32, 0),
      'weight': ((), np.float32, 0),
      'annotator': ((length,), np.int32, -1),
      'label_count': ((length,), np.float32, 0),
    }
    self.features: Features = {
      'label': ((length,), np.int32, -1),
      **{name: known[name] for name in fields},
    }

  def rows(self, labels: np.ndarray, keys: np.ndarray) -> Columns:
    """Labels as a source reads them, padded to L, and [B] None: no example has a problem."""
    del keys
    given = {name: labels[name] for name in labels.dtype.names or ()} or {'label': labels}
    width = given['label'].shape[1]
    if width > self.length:
      raise ValueError(
        f"task_feature_lengths['label'] is {self.length}; there is an example with {width} labels."
      )
    rows = {}
    for name, (shape, dtype, padding) in self.features.items():
      rows[name] = np.full((len(labels), *shape), padding, dtype)
      if name in given:
        rows[name][..., : width if shape else None] = given[name]
      else:  # hard labels that are mixed
        label = given['label']
        listed = label >= 0
        count = np.maximum(listed.sum(1, keepdims=True), 1)
        repeats = (label[:, :, None] == label[:, None]).sum(2)
        rows[name][:, :width] = listed * (count / repeats if name == 'label_count' else 1 / count)
    return rows, [None] * len(labels)


def with_fields(label: np.ndarray, **fields: np.ndarray | None) -> np.ndarray:
  """Labels int32 [N, L] with the fields that are not None, as a structured array [N]."""
  given = {name: x for name, x in fields.items() if x is not None}
  if not given:
    return label
  types = [
    (name, np.int32 if x.dtype.kind in 'iu' else np.float32, x.shape[1:])
    for name, x in given.items()
  ]
  rows = np.empty(len(label), [('label', np.int32, label.shape[1:]), *types])
  for name, x in {'label': label, **given}.items():
    rows[name] = x
  return rows


def annotator_numbers(
  where: str, names: np.ndarray, listed: np.ndarray
) -> tuple[tuple[str, ...], np.ndarray]:
  """Numbers the people who gave votes; `listed`, bool [N, L], marks the votes.

  `names` are strings or integers [N, L], '' or a negative number for nobody.

  Returns:
    The distinct names in order, and their numbers int32 [N, L], -1 where there is no vote.

  Raises:
    ValueError: a vote has no annotator, or an annotator has two votes for an example.
  """
  is_number = names.dtype.kind in 'iu'
  names = names if is_number else names.astype(str)  # bytes, too
  missing = listed & (names < 0 if is_number else names == '')
  if missing.any():
    i, j = np.argwhere(missing)[0]
    raise ValueError(f'{where}: vote {j + 1} of example {i} has no annotator.')
  people, of_votes = np.unique(names[listed], return_inverse=True)
  numbers = np.full(names.shape, -1, np.int32)
  numbers[listed] = of_votes
  ordered = np.sort(numbers, axis=1)
  twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
  if twice.any():
    i = int(np.flatnonzero(twice.any(1))[0])
    who = people[ordered[i, 1:][twice[i]][0]]
    raise ValueError(f'{where}: annotator {str(who)!r} has two votes for example {i}.')
  return tuple(map(str, people)), numbers


class Captions:
  """Captions: text int32 [B, L], the token ids of one caption per image; see `tokenize`.

  If an image has several captions, training draws one with the example's key, so that epochs show
  different ones, and evaluation takes the first. Blank captions count as missing. The first caption
  that is cut to L tokens is logged.
  """

  noun = 'image-text pair'

  def __init__(self, vocabulary: Vocabulary, length: int, at_random: bool):
    """`length` is L; `at_random` tells whether one of several captions is drawn."""
    self._vocabulary = vocabulary
    self.length = length
    self.features: Features = {'text': ((length,), np.int32, PADDING)}
    self._at_random = at_random
    self._has_cut = False

  def rows(self, captions: Sequence[Sequence[str]], keys: np.ndarray) -> Columns:
    """Token ids of one caption of each example, given the captions and keys uint64 [B] of examples.

    Returns:
      The features, whose content is arbitrary for examples with a problem, and [B] None, or the
      reason why the example has no text.
    """
    draws = counter_random.fold(keys, _CAPTION_STREAM)
    ids = []
    problems = []
    for several, draw in zip(captions, draws.tolist(), strict=True):
      several = [caption for caption in several if caption.strip()]
      caption = several[draw % len(several) if self._at_random else 0] if several else ''
      tokens = []
      problem = 'its caption is missing or empty'
      if caption:
        try:
          caption.encode()
          tokens = self._vocabulary.encode(caption)
          problem = None if len(tokens) else 'its caption has no tokens in the vocabulary'
        except UnicodeEncodeError:
          problem = 'its caption is not valid UTF-8'
      ids.append(tokens)
      problems.append(problem)
    too_long = [len(tokens) for tokens in ids if len(tokens) >= self.length]
    if too_long and not self._has_cut:
      self._has_cut = True
      logging.getLogger(__name__).warning(
        "Captions are cut to task_feature_lengths['text'] = %d tokens; one has %d and its end.",
        self.length,
        too_long[0],
      )
    return {'text': token_rows(ids, self.length)}, problems


def token_rows(ids: Sequence[Sequence[int]], length: int) -> np.ndarray:
  """Token ids without their end as int32 [N, length]: cut to fit, then END, then PADDING."""
  rows = np.full((len(ids), length), PADDING, np.int32)
  for row, tokens in zip(rows, ids, strict=True):
    count = min(len(tokens), length - 1)
    row[:count] = tokens[:count]
    row[count] = END
  return rows
