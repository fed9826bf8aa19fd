"""Charts of candidates: that all kinds of input are drawn, at the asked size."""

import io
import math

import numpy as np
import pytest
from PIL import Image

from het_plugin import reporting


def size(png):
  return Image.open(io.BytesIO(png)).size


def ink(png):
  """Pixels that are not white."""
  return int((np.asarray(Image.open(io.BytesIO(png)).convert('L')) < 255).sum())


@pytest.mark.parametrize('number', [1, 5, 30])  # 30 have no legend
def test_lines(number):
  lines = {f'candidate {i}': ((1, 5, 20), (0.1, 0.2, 0.3 + i / 100)) for i in range(number)}
  png = reporting.lines_png(
    lines, xlabel='k', ylabel='accuracy', log_x=True, whole_steps=True, dpi=50
  )
  assert size(png) == (400, 225)


def test_lines_with_gaps_and_without_any_value():
  def draw(y):
    return reporting.lines_png({'a': (range(4), y)}, xlabel='x', ylabel='y', log_y=True, dpi=50)

  whole, gap, nothing = draw([1, 2, 3, 4]), draw([1, math.inf, 0, 4]), draw([math.nan] * 4)
  assert ink(nothing) < ink(whole) and ink(gap) > 0


@pytest.mark.parametrize('number', [1, 30])
def test_scatter(number):
  x = np.linspace(0.1, 0.9, number)
  groups = {'1 shot': (x, x / 2), '5 shots': (x, x)}
  names = [f'candidate {i}' for i in range(number)]
  png = reporting.scatter_png(groups, names, xlabel='proxy', ylabel='accuracy', dpi=50)
  assert size(png) == (400, 225)
