"""The plots of `evaluate`: PNGs of the expected shape, whatever is in the data."""

import dataclasses
import io
import warnings

import numpy as np
import pytest
from PIL import Image

from het_plugin import reporting


@dataclasses.dataclass(frozen=True)
class Bins:
  count: np.ndarray
  confidence: np.ndarray
  accuracy: np.ndarray


def size_of(png):
  with warnings.catch_warnings():
    warnings.simplefilter('error')  # a glyph that the font lacks
    return Image.open(io.BytesIO(png)).size


def test_lines():
  x = np.arange(1, 5001) / 5000
  curves = {'$dollars_': (x, x**2), 'one point': (np.ones(1), np.zeros(1))}
  labels = {'title': 't', 'x_label': 'x', 'y_label': 'y'}
  flat = size_of(reporting.unit_curves_png(curves, **labels))
  assert flat == size_of(reporting.unit_curves_png(curves, **labels, diagonal=True))
  with pytest.raises(ValueError, match='no curve'):
    reporting.unit_curves_png({}, **labels)


def test_a_panel_a_row_and_empty_bins():
  bins = Bins(np.array([3, 0]), np.array([0.25, np.nan]), np.array([1.0, np.nan]))
  one = size_of(reporting.reliability_png({'a': bins}))
  four = size_of(reporting.reliability_png({name: bins for name in 'abcd'}))
  assert four[0] == pytest.approx(3 * one[0], abs=3) and four[1] == pytest.approx(2 * one[1], abs=3)
  with pytest.raises(ValueError, match='no reliability diagram'):
    reporting.reliability_png({})


@pytest.mark.parametrize('channels', [1, 3])
def test_class_correlations(channels):
  panel = reporting.CovariancePanel(
    image=np.linspace(-1.5, 1, 16 * channels).reshape(4, 4, channels),
    title='A  LATIN CAPITAL LETTER A',
    classes=['$  DOLLAR SIGN', 'Ж' * 99],
    probability=np.array([0.75, 1e-40]),
    correlation=np.array([[1.0, -0.5], [-0.5, 1.0]]),
    anchor='$',
    neighbours=[('$_{', 0.5)],
  )
  width, height = size_of(reporting.covariance_png(panel))
  assert width > 2 * height
