"""Training curves, by the pixels that come out."""

import io
import math

import numpy as np
import pytest
from PIL import Image

from het_plugin import reporting
from het_plugin.reporting import style

HUES = {'#ff0000': 0, '#00ff00': 1, '#0000ff': 2}  # colour: its channel


@pytest.fixture(autouse=True)
def pure_colours(monkeypatch):
  """Lines that no other pixel of the figure can be taken for."""
  monkeypatch.setattr(style, 'STYLES', [(colour, 'solid') for colour in HUES])


def draw(curves, dpi=100):
  """[height, width, RGB] of the figure."""
  png = reporting.curves_png(curves, dpi=dpi)
  return np.asarray(Image.open(io.BytesIO(png)).convert('RGB'), int)


def line_pixels(image, number):
  """[height, width] of whether a pixel is of the line of the head of this number."""
  others = np.delete(image, number, axis=-1)
  return image[..., number] - others.max(-1) > 100


def test_a_wide_range_and_a_single_point_can_be_drawn():
  draw({'a': {'step': range(500), 'loss': np.geomspace(1e-3, 1e3, 500)}}, dpi=30)
  draw({'a': {'step': [1], 'tau': [math.nan]}}, dpi=30)
  draw({'a': {'step': [1, 2], 'loss': [2.0, math.inf]}, 'b': {'step': [], 'loss': []}}, dpi=30)


def test_nans_are_a_gap(num_points=600):  # which are smoothed
  loss = np.linspace(5.0, 3.0, num_points)
  whole = draw({'': {'step': range(num_points), 'loss': loss}})
  columns = np.flatnonzero(line_pixels(whole, 0).any(0))
  width = len(columns)
  assert np.diff(columns).max() == 1
  third = num_points // 3
  loss[third : 2 * third] = math.nan
  cut = draw({'': {'step': range(num_points), 'loss': loss}})
  gaps = np.diff(np.flatnonzero(line_pixels(cut, 0).any(0)))
  # The segments that lead to the first and from the last missing point are gone too.
  assert 0.3 * width < gaps.max() < 0.4 * width and (gaps > 1).sum() == 1


def test_several_heads_have_a_legend():
  flat = {'step': [0, 1], 'loss': [3.0, 3.0]}
  alone, both = draw({'DET': flat}), draw({'DET': flat, 'HET': {**flat, 'loss': [5.0, 5.0]}})
  rows = [np.flatnonzero(line_pixels(image, 0).any(1)) for image in (alone, both)]
  assert np.ptp(rows[0]) < 5 < np.ptp(rows[1])  # the line, and its sample in the legend
  pngs = reporting.curve_pngs({'DET': {**flat, 'tau': [1.0, 1.0]}, 'HET': flat})
  assert len(pngs) == 2 and len({Image.open(io.BytesIO(png)).size for png in pngs}) == 1


@pytest.mark.parametrize(
  'curves,words',
  [
    ({'DET': {'step': [1]}}, "heads: \\['DET'\\]"),
    ({'DET': {'step': [1, 2], 'loss': [1.0]}}, 'DET: 2 steps but 1 values of loss'),
  ],
)
def test_wrong_curves_are_an_error(curves, words):
  with pytest.raises(ValueError, match=words):
    reporting.curves_png(curves)


def test_examples_have_a_line_per_model_and_names_are_no_formulas():
  images = np.zeros((2, 6, 6, 1), np.float32)
  predictions = {'$DET_': [('$', 0.9, True), ('$$_', 0.1, False)]}
  one = reporting.examples_png(images, ['$', '$a_'], predictions)
  more = reporting.examples_png(images, ['$', '$a_'], predictions | {'HET': predictions['$DET_']})
  assert one.startswith(b'\x89PNG') and len(more) > len(one)
