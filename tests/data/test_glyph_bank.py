import unicodedata

import numpy as np

from het_plugin.data import glyph_bank
from het_plugin.data.glyph_bank import DEJAVU_FACES, STIX_FACES, face_characters, glyph_classes


def test_frozen_list_agrees_with_the_fonts():
  """Later Unicode tables may name or reclassify a few characters: the list is what counts then."""

  def is_candidate(c):
    return unicodedata.category(chr(c))[0] in 'LNSP' and unicodedata.name(chr(c), None)

  dejavu = [face_characters(face) for face in DEJAVU_FACES]
  core = {c for c in frozenset.intersection(*dejavu) if is_candidate(c)}
  full = {c for c in frozenset.union(*dejavu) if is_candidate(c)}
  assert len(core ^ set(glyph_classes('core').code_points)) <= 5
  assert len(full ^ set(glyph_classes('full').code_points)) <= 20
  assert set(glyph_classes('core').code_points) <= set(glyph_classes('full').code_points)


def test_heldout_classes_are_in_two_stix_faces_and_not_in_core():
  heldout = glyph_classes('heldout').code_points
  assert not set(heldout) & set(glyph_classes('core').code_points)
  assert all(sum(c in face_characters(face) for face in STIX_FACES) >= 2 for c in heldout)


def test_bank_has_every_core_glyph_inside_the_border():
  bank = glyph_bank.glyph_bank('core', DEJAVU_FACES, 28)
  bank.draw()
  assert bank.images.shape == (27_564, 30, 30) and bank.images.dtype == np.uint8
  assert (bank.faces_per_class == 12).all()
  assert not bank.images[:, [0, -1]].any() and not bank.images[:, :, [0, -1]].any()
  assert (bank.images.max(axis=(1, 2)) > 0).mean() > 0.999
