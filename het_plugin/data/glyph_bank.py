"""Unicode characters, each rendered once per process: the un-augmented glyphs of the glyph tasks.

The classes are frozen in glyph_classes.tsv, so that class ids depend neither on Python's Unicode
tables nor on the fonts' versions. All of them are letters, numbers, symbols or punctuation marks
(general category L, N, S or P) that have a Unicode name:
  core     glyphs that all 12 DejaVu text faces share (2,297)
  latin    the part of core up to U+017F, Latin Extended-A (316)
  full     glyphs of any of these faces (6,494)
  heldout  glyphs of at least two STIX faces that are not in core (1,142)
"""

import collections
import csv
import dataclasses
import functools
import importlib.resources
import pathlib
import sys
import threading
from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib import ft2font
from PIL import ImageFont

from het_plugin.data.locked_cache import locked_cache

# matplotlib ships two more, DejaVu*Display: subsets of a few dozen characters, not used here.
DEJAVU_FACES = (
  'DejaVuSans',
  'DejaVuSans-Bold',
  'DejaVuSans-BoldOblique',
  'DejaVuSans-Oblique',
  'DejaVuSansMono',
  'DejaVuSansMono-Bold',
  'DejaVuSansMono-BoldOblique',
  'DejaVuSansMono-Oblique',
  'DejaVuSerif',
  'DejaVuSerif-Bold',
  'DejaVuSerif-BoldItalic',
  'DejaVuSerif-Italic',
)
STIX_FACES = ('STIXGeneral', 'STIXGeneralBol', 'STIXGeneralBolIta', 'STIXGeneralItalic')

# Fractions of the image side: the size of the em, and the box every glyph must fit in so that
# rotation, shear and translation do not cut it off.
_EM = 0.85
_BOX = 0.72
_LATIN_END = 0x17F


@dataclasses.dataclass(frozen=True)
class GlyphClasses:
  """Class k is the character `code_points[k]`, named `names[k]`."""

  code_points: tuple[int, ...]
  names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GlyphBank:
  """Rendered glyphs of K classes, sorted by class: class k owns rows first[k] .. first[k + 1] - 1.

  images: uint8 [P, S + 2, S + 2], ink = 255; one row for each (class, face) pair for which the face
    has the character. S is the image side; sampling outside of it reads the blank border.
  first: int64 [K + 1]. A class that no face has owns no rows.
  faces: int64 [P], the number of each row's face, in the order of the requested faces.
  draw: makes sure that some rows of `images` (by default all) are drawn; call it before they are
    used, from any thread.
  """

  images: np.ndarray
  first: np.ndarray
  faces: np.ndarray
  draw: Callable[..., None] = lambda rows=None: None

  @property
  def faces_per_class(self) -> np.ndarray:
    """The number of faces that have each class, int64 [K]."""
    return np.diff(self.first)


@functools.cache
def glyph_classes(class_set: str) -> GlyphClasses:
  """The frozen classes of a set, in order of code point."""
  column, end = ('core', _LATIN_END) if class_set == 'latin' else (class_set, sys.maxunicode)
  table = importlib.resources.files('het_plugin.data').joinpath('glyph_classes.tsv')
  with table.open(encoding='utf-8', newline='') as lines:
    rows = [row for row in csv.DictReader(lines, delimiter='\t') if row[column] == '1']
  rows = [row for row in rows if int(row['code_point'], 16) <= end]
  return GlyphClasses(
    code_points=tuple(int(row['code_point'], 16) for row in rows),
    names=tuple(row['name'] for row in rows),
  )


@functools.cache
def face_characters(face: str) -> frozenset[int]:
  """Code points for which a face has a glyph."""
  return frozenset(ft2font.FT2Font(str(_face_path(face))).get_charmap())


@locked_cache
def glyph_bank(class_set: str, faces: tuple[str, ...], size: int) -> GlyphBank:
  """The glyphs of every class of `class_set` in each of `faces` that has it, at side `size` pixels.

  Glyphs keep the proportions of their face (one em size), except that those larger than the box are
  made smaller; they are centred on their ink. To draw the 27,564 glyphs of core at 28 pixels takes
  about 1 s, so each is drawn when it is first needed.
  """
  code_points = glyph_classes(class_set).code_points
  owned = [[f for f in faces if c in face_characters(f)] for c in code_points]
  first = np.concatenate([[0], np.cumsum([len(fs) for fs in owned])])
  pairs = [(face, chr(c)) for c, fs in zip(code_points, owned, strict=True) for face in fs]
  images = np.zeros((len(pairs), size + 2, size + 2), np.uint8)
  every = np.arange(len(pairs))
  blank = np.ones(len(pairs), bool)
  lock = threading.Lock()

  def draw(rows: np.ndarray = every) -> None:
    with lock:
      fonts = functools.cache(_load_font)  # released after this call: together they are 50 MB
      for row in np.unique(rows[blank[rows]]):
        _draw_centred(images[row, 1:-1, 1:-1], fonts, *pairs[row])
        blank[row] = False

  numbers = np.array([faces.index(face) for face, _ in pairs], np.int64)
  return GlyphBank(images, first, numbers, draw)


def homoglyphs(
  class_set: str = 'core', faces: tuple[str, ...] = DEJAVU_FACES, size: int = 28
) -> tuple[frozenset[int], ...]:
  """For each class, the other classes that some face renders to the same bitmap at this size."""
  bank = glyph_bank(class_set, faces, size)
  same = [set() for _ in bank.faces_per_class]
  for classes in _classes_of_bitmaps(bank).values():
    for k in classes:
      same[k] |= classes.keys() - {k}
  return tuple(map(frozenset, same))


def _classes_of_bitmaps(bank: GlyphBank) -> dict[bytes, collections.Counter]:
  """How many faces of each class have each bitmap."""
  bank.draw()
  classes = collections.defaultdict(collections.Counter)
  numbers = np.repeat(np.arange(len(bank.faces_per_class)), bank.faces_per_class)
  for image, k in zip(bank.images, numbers.tolist(), strict=True):
    classes[image.tobytes()][k] += 1
  return classes


def _face_path(face: str) -> pathlib.Path:
  return pathlib.Path(matplotlib.get_data_path(), 'fonts', 'ttf', f'{face}.ttf')


def _load_font(face: str, pixels: int) -> ImageFont.FreeTypeFont:
  # Basic layout draws the character's own glyph; complex layout could substitute or reorder it.
  return ImageFont.truetype(_face_path(face), pixels, layout_engine=ImageFont.Layout.BASIC)


def _draw_centred(image: np.ndarray, fonts, face: str, character: str) -> None:
  """Draws one character into image uint8 [S, S], in place."""
  side = len(image)
  em = round(_EM * side)
  box = round(_BOX * side)
  ink = _ink(fonts(face, em), character)
  while max(ink.shape) > box:
    em = min(em - 1, em * box // max(ink.shape))
    ink = _ink(fonts(face, em), character)
  height, width = ink.shape
  top = (side - height) // 2
  left = (side - width) // 2
  image[top : top + height, left : left + width] = ink


def _ink(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray:
  """The rendered character without the blank around it, uint8 [h, w]; [0, 0] if all is blank."""
  mask = font.getmask(character, mode='L')
  box = mask.getbbox()
  if box is None:
    return np.zeros((0, 0), np.uint8)
  return np.asarray(mask.crop(box)).reshape(box[3] - box[1], box[2] - box[0])
