"""The glyph tasks: augmented Unicode characters, made on the fly and keyed by example number.

Example i of a split shows the class perm_b[i mod K] with b = i div K, where perm_b is a permutation
of the split's K classes: every block of K examples holds each class once. The face and the
augmentation are drawn from a key made of (seed, split, i) alone, so reading needs no state. Finite
splits do not depend on the seed: they are the same for every run.

docs/data.md has the tasks and their splits. Unshuffled, the first s K examples of glyphs_heldout's
train are s shots of every class.
"""

import dataclasses
import functools

import numpy as np

from het_plugin.data import counter_random, glyph_augment, glyph_bank, glyph_confusions
from het_plugin.data.sources import ImageTextInfo, TaskInfo

_FACE_STREAM = 2**33  # folded into an example's key; apart from the augmentation's counters


@dataclasses.dataclass(frozen=True)
class GlyphSplit:
  """The faces of a split, and its examples per class (None: endless)."""

  faces: tuple[str, ...]
  examples_per_class: int | None


_TRAINING_SPLITS = {
  'train': GlyphSplit(glyph_bank.DEJAVU_FACES, None),
  'validation': GlyphSplit(glyph_bank.DEJAVU_FACES, 4),
  'shift': GlyphSplit(glyph_bank.STIX_FACES, 4),
}
SPLITS = {
  'core': _TRAINING_SPLITS,
  'latin': {
    'train': GlyphSplit(glyph_bank.DEJAVU_FACES, None),
    'finite': GlyphSplit(glyph_bank.DEJAVU_FACES, 64),
    'validation': GlyphSplit(glyph_bank.DEJAVU_FACES, 48),
  },
  'full': _TRAINING_SPLITS,
  'heldout': {
    'train': GlyphSplit(glyph_bank.STIX_FACES, 32),
    'test': GlyphSplit(glyph_bank.STIX_FACES, 8),
  },
}


class GlyphSource:
  """An ExampleSource of augmented glyphs, float32 [B, size, size, 1] in [-1, 1], for any size.

  class_set: 'core', 'latin', 'full' or 'heldout'.
  """

  def __init__(self, class_set: str):
    if class_set not in SPLITS:
      raise ValueError(f'class_set is {class_set!r}; it must be one of {sorted(SPLITS)}.')
    self.class_set = class_set

  @functools.cached_property
  def info(self) -> TaskInfo:
    classes = glyph_bank.glyph_classes(self.class_set)
    pairs = zip(classes.code_points, classes.names, strict=True)
    num_examples = {
      name: split.examples_per_class
      and split.examples_per_class * len(_split_classes(self.class_set, name))
      for name, split in SPLITS[self.class_set].items()
    }
    return TaskInfo(
      num_classes=len(classes.names),
      multi_label=False,
      channels=1,
      class_names=classes.names,
      splits=num_examples,
      shown_names=tuple(f'{chr(c)}  {name}' for c, name in pairs),
      look_alikes=self.look_alikes,
    )

  def look_alikes(self, split: str, image_size: int) -> tuple[frozenset[int], ...]:
    """For each class, the classes that look the same in some typeface of the split."""
    whole, _, _ = split.partition('[')  # of a slice
    faces = SPLITS[self.class_set][whole].faces
    return glyph_bank.homoglyphs(self.class_set, faces, image_size)

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[np.ndarray, np.ndarray]:
    bank, classes, rows, keys = self._draw(split, ids, size, seed)
    bank.draw(rows)
    images = glyph_augment.augment(bank.images, rows, keys)
    return images, self._labels(split, classes, rows, keys).astype(np.int32)[:, None]

  def describe(self, split: str, example_id: int) -> str:
    return f'{self.class_set} glyph {example_id} of {split}'

  def _draw(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[glyph_bank.GlyphBank, np.ndarray, np.ndarray, np.ndarray]:
    """The bank and, per example, class, row of the bank and key: int64, int64, uint64 [B]."""
    spec = SPLITS[self.class_set][split]
    bank = glyph_bank.glyph_bank(self.class_set, spec.faces, size)
    split_number = list(SPLITS[self.class_set]).index(split)
    stream_seed = seed if spec.examples_per_class is None else 0
    classes = self._classes(split, ids, (stream_seed, split_number))
    keys = counter_random.fold(counter_random.base_key(stream_seed, split_number), ids)
    face_draw = counter_random.fold(keys, _FACE_STREAM)
    face = (face_draw % bank.faces_per_class[classes].astype(np.uint64)).astype(np.int64)
    return bank, classes, bank.first[classes] + face, keys

  def _labels(self, split: str, classes, rows, keys) -> np.ndarray:
    """The labels of examples as drawn, int64 [B]."""
    return classes

  def _classes(self, split: str, ids: np.ndarray, stream: tuple[int, int]) -> np.ndarray:
    """The class of each example, int64 [B]."""
    split_classes = _split_classes(self.class_set, split)
    block, position = np.divmod(ids, len(split_classes))
    classes = np.empty(len(ids), np.int64)
    for b in np.unique(block):
      here = block == b
      classes[here] = _block_order(*stream, int(b), len(split_classes))[position[here]]
    return split_classes[classes]


class NoisyGlyphSource(GlyphSource):
  """A GlyphSource with noisy labels from readers who confuse lookalikes.

  Each image is the same as in GlyphSource, whose labels are the true ones.

  reader_noise: how much readers confuse, h of an image of difficulty 1 (`glyph_confusions`).
  """

  def __init__(self, class_set: str, reader_noise: float = glyph_confusions.READER_NOISE):
    super().__init__(class_set)
    self.reader_noise = reader_noise

  @functools.cached_property
  def info(self) -> TaskInfo:
    return dataclasses.replace(
      super().info,
      true_classes=self.true_classes,
      label_distribution=self.label_distribution,
    )

  def true_classes(self, split: str, ids: np.ndarray, seed: int = 0) -> np.ndarray:
    """The classes shown in examples of a whole split, int64 [B]."""
    return self._draw(split, ids, glyph_confusions.SIZE, seed)[1]

  def label_distribution(
    self, split: str, ids: np.ndarray, seed: int = 0
  ) -> tuple[np.ndarray, np.ndarray]:
    """The distribution from which the labels of `read` are drawn: glyph_confusions.distribution."""
    _, _, rows, keys = self._draw(split, ids, glyph_confusions.SIZE, seed)
    faces = SPLITS[self.class_set][split].faces
    return glyph_confusions.distribution(self.class_set, faces, rows, keys, self.reader_noise)

  def _labels(self, split: str, classes, rows, keys) -> np.ndarray:
    faces = SPLITS[self.class_set][split].faces
    return glyph_confusions.labels(self.class_set, faces, rows, keys, self.reader_noise)


class GlyphNameSource(GlyphSource):
  """The images of a GlyphSource, each with its character's name in lower case."""

  @functools.cached_property
  def info(self) -> ImageTextInfo:
    info = super().info
    return ImageTextInfo(channels=info.channels, splits=info.splits)

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[np.ndarray, list[tuple[str]]]:
    images, labels = super().read(split, ids, size, seed)
    names = glyph_bank.glyph_classes(self.class_set).names
    return images, [(names[k].lower(),) for k in labels[:, 0].tolist()]


# The tasks of images with class labels, by name.
SOURCES = {
  'glyphs_core': GlyphSource('core'),
  'glyphs_full': GlyphSource('full'),
  'glyphs_heldout': GlyphSource('heldout'),
  'glyphs_noisy': NoisyGlyphSource('core'),
  'glyphs_noisy_mild': NoisyGlyphSource('core', reader_noise=0.27),
  'glyphs_noisy_full': NoisyGlyphSource('full'),
  'glyphs_noisy_latin': NoisyGlyphSource('latin'),
}


@functools.cache
def _split_classes(class_set: str, split: str) -> np.ndarray:
  """The classes that some face of the split has, int64 [K]."""
  faces = SPLITS[class_set][split].faces
  present = frozenset().union(*(glyph_bank.face_characters(face) for face in faces))
  code_points = glyph_bank.glyph_classes(class_set).code_points
  return np.array([k for k, c in enumerate(code_points) if c in present])


@functools.lru_cache(maxsize=128)  # more than any finite split has; shuffled it needs all of them
def _block_order(seed: int, split_number: int, block: int, num_classes: int) -> np.ndarray:
  key = counter_random.base_key(seed, split_number, block)
  return counter_random.permutation(key, num_classes)
