"""The few-shot plot, as far as a picture can be checked."""

import io

import pytest
from PIL import Image

from het_plugin import reporting

CELLS = {1: (0.2, 0.01), 5: (0.5, None), 25: (0.8, 0.02)}


def size(png):
  return Image.open(io.BytesIO(png)).size


def test_a_panel_a_data_set():
  one = size(reporting.shots_png({'det': {'birds': CELLS}}, dpi=50))
  three = size(reporting.shots_png({'det': dict.fromkeys('abc', CELLS)}, dpi=50))
  four = size(reporting.shots_png({'det': dict.fromkeys('abcd', CELLS)}, dpi=50))
  assert three[0] == four[0] == 3 * one[0] and three[1] == one[1] < four[1]


def test_runs_may_lack_data_sets():
  some = {'det': {'birds': CELLS}, 'het_xl': {'birds': CELLS, 'cars': {5: (0.1, 0.1)}}}
  assert reporting.shots_png(some, dpi=50) != reporting.shots_png({'det': some['det']}, dpi=50)
  with pytest.raises(ValueError, match='no data set'):
    reporting.shots_png({})
