"""Label noise of known distribution: simulated readers confuse glyphs that look alike.

A reader who sees class k in some face answers j with probability p(j) proportional to
exp(-d_kj^2 / 2 h^2). The candidates j are k itself and the classes that look most like it in that
face; d is the distance between the un-augmented glyphs, and h is the reader's noise, which grows
with the noise of the image (`glyph_augment.difficulty`). Labels are therefore less certain for
noisier images and for characters with more lookalikes: the noise depends on the input and is
correlated between classes.
"""

import dataclasses

import numpy as np

from het_plugin.data import counter_random, glyph_augment, glyph_bank
from het_plugin.data.locked_cache import locked_cache

NUM_CANDIDATES = 9  # the class itself and eight others
READER_NOISE = 0.5  # h of an image of difficulty 1; levels are 0 to 1, summed over 14 x 14 pixels

SIZE = 28  # glyphs of any image size are compared at this side and half the resolution
_LABEL_STREAM = 2**34  # folded into an example's key; apart from the other streams of a glyph


@dataclasses.dataclass(frozen=True)
class Lookalikes:
  """For each row of a GlyphBank, the classes that it may be confused with, nearest first.

  Attributes:
    classes: int64 [P, C]; the row's own class first. Rows of a face with fewer than C classes
      repeat their own, at an infinite distance.
    squared_distance: float64 [P, C] to those classes' glyphs in the same face; 0 for the own class.
  """

  classes: np.ndarray
  squared_distance: np.ndarray


@locked_cache
def lookalikes(class_set: str, faces: tuple[str, ...]) -> Lookalikes:
  """The lookalikes within each face; a second or two for the 27,564 glyphs of core."""
  bank = glyph_bank.glyph_bank(class_set, faces, SIZE)
  return nearest(bank, NUM_CANDIDATES)


def nearest(bank: glyph_bank.GlyphBank, num_candidates: int) -> Lookalikes:
  """The classes nearest to every row of a bank of even side, in the same face."""
  bank.draw()
  num_rows = len(bank.images)
  side = bank.images.shape[1] - 2
  blocks = bank.images[:, 1:-1, 1:-1].reshape(num_rows, side // 2, 2, side // 2, 2)
  # Sums of four levels are integers, and so are the products below, so results do not depend on the
  # machine.
  x = blocks.sum((2, 4), dtype=np.float64).reshape(num_rows, -1)  # [P, (side / 2)^2]
  classes_of_rows = np.repeat(np.arange(len(bank.faces_per_class)), bank.faces_per_class)
  classes = np.repeat(classes_of_rows[:, None], num_candidates, axis=1)  # [P, C]
  squared_distance = np.full(classes.shape, np.inf)
  squared_distance[:, 0] = 0
  for face in np.unique(bank.faces):
    rows = np.flatnonzero(bank.faces == face)  # [N], sorted by class
    norm = np.square(x[rows]).sum(1)
    distance = norm[:, None] + norm - 2 * (x[rows] @ x[rows].T)  # [N, N]
    np.fill_diagonal(distance, -1)  # the own class comes before its homoglyphs
    # Ties, which are many, go to the lower class.
    order = distance * len(rows) + np.arange(len(rows))
    kept = min(num_candidates, len(rows))
    near = np.argpartition(order, kept - 1, axis=1)[:, :kept]
    near = np.take_along_axis(near, np.argsort(np.take_along_axis(order, near, 1), axis=1), 1)
    classes[rows, :kept] = classes_of_rows[rows][near]
    squared_distance[rows, 1:kept] = np.take_along_axis(distance, near, 1)[:, 1:] / (4 * 255) ** 2
  return Lookalikes(classes, squared_distance)


def distribution(
  class_set: str,
  faces: tuple[str, ...],
  rows: np.ndarray,
  keys: np.ndarray,
  reader_noise: float = READER_NOISE,
) -> tuple[np.ndarray, np.ndarray]:
  """The distribution of the labels of images, given rows of the bank and augmentation keys, [B].

  `reader_noise` is h of an image of difficulty 1.

  Returns:
    The candidate classes, int64 [B, C], the true one first, and their probabilities, float64
    [B, C].
  """
  table = lookalikes(class_set, faces)
  h = reader_noise * glyph_augment.difficulty(keys)  # [B]
  p = np.exp(-table.squared_distance[rows] / (2 * h[:, None] ** 2))  # the first is 1
  return table.classes[rows], p / p.sum(1, keepdims=True)


def labels(
  class_set: str,
  faces: tuple[str, ...],
  rows: np.ndarray,
  keys: np.ndarray,
  reader_noise: float = READER_NOISE,
) -> np.ndarray:
  """Labels of one reader, int64 [B], a function of the keys. Arguments as in `distribution`."""
  classes, p = distribution(class_set, faces, rows, keys, reader_noise)
  u = counter_random.uniform(counter_random.fold(keys, _LABEL_STREAM), 1)  # [B, 1], <= 1 - 2^-24
  answer = (p.cumsum(1) <= u).sum(1, keepdims=True)  # the sum of all p is closer to 1 than u
  return np.take_along_axis(classes, answer, 1)[:, 0]
