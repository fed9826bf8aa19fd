"""Plots: what comes out for gaps, many lines and names that hold anything."""

import io
import math
import types

import numpy as np
import pytest
from PIL import Image

from het_plugin import reporting
from het_plugin.reporting import style

NAME = r'$\frac{$ <b> Ж'  # never taken for mathematics
UNIT = np.linspace(0, 1, 5000)


BINS = types.SimpleNamespace(
  count=np.array([3, 0]), confidence=np.array([0.25, np.nan]), accuracy=np.array([1.0, np.nan])
)
SHOTS = [
  {
    'name': run,
    'fewshot': {dataset: {1: 0.2, 5: 0.5, 25: 0.8}},
    'fewshot_stderr': {dataset: {1: 0.01, 5: None, 25: 0.02}},
  }
  for run, dataset in ((NAME, NAME), ('b', 'c'))
]
GAPS = ([1, 2, 3, 4], [1, math.inf, 0, 100])


def covariance(channels):
  return reporting.covariance_png(
    image=np.linspace(-1.5, 1, 16 * channels).reshape(4, 4, channels),
    title=NAME,
    classes=[NAME, 'b' * 99],
    probability=np.array([0.75, 1e-40]),
    correlation=np.array([[1.0, -0.5], [-0.5, 1.0]]),
    anchor=NAME,
    neighbours=[(NAME, 0.5)],
  )


def many(count):
  return {f'{NAME} {i}': GAPS for i in range(count)}


PLOTS = {
  'curves': lambda: reporting.curve_pngs({NAME: {'step': [1, 2], 'loss': [100.0, 1.0]}})[0],
  'curves, gaps': lambda: reporting.curve_pngs(
    {'a': {'step': range(500), 'tau': [math.nan, *UNIT[1:500]]}, 'b': {'step': [], 'tau': []}}
  )[0],
  'lines': lambda: reporting.lines_png(many(2), xlabel=NAME, ylabel='y', log_y=True),
  'many lines': lambda: reporting.lines_png(
    many(30), xlabel='x', ylabel='y', log_x=True, whole_steps=True
  ),
  'scatter': lambda: reporting.scatter_png(many(2), [NAME] * 4, xlabel='x', ylabel='y'),
  'unit curves': lambda: reporting.unit_curves_png(
    {NAME: (UNIT, UNIT**2), 'one point': (np.ones(1), np.zeros(1))},
    title=NAME,
    x_label='x',
    y_label='y',
    diagonal=True,
  ),
  'shots': lambda: reporting.shots_png(SHOTS),
  'reliability': lambda: reporting.reliability_png(dict.fromkeys([NAME, *'abc'], BINS)),
  'grey image': lambda: covariance(1),
  'coloured image': lambda: covariance(3),
  'examples': lambda: reporting.examples_png(
    np.zeros((1, 4, 4, 1)), [NAME], {NAME: [(NAME, 0.5, True)]}
  ),
}


def test_long_names_are_not_cut_off():
  rows = [SHOTS[1] | {'name': f'het_xl/LEARNING_RATE={i}'} for i in range(4)]
  image = Image.open(io.BytesIO(reporting.shots_png(rows))).convert('L')
  assert np.asarray(image)[:, [0, -1]].min() > 250  # nothing at an edge


@pytest.mark.parametrize('name', PLOTS)
def test_anything_can_be_drawn(name):
  drawn = PLOTS[name]()
  for png in (drawn.light, drawn.dark) if isinstance(drawn, reporting.Picture) else (drawn,):
    assert min(Image.open(io.BytesIO(png)).size) > 20


def test_a_picture_is_dark_on_a_dark_page_but_for_what_it_shows():
  white = reporting.examples_png(np.ones((1, 4, 4, 1)), ['x'], {'m': [('y', 0.5, True)]})
  light, dark = (np.asarray(Image.open(io.BytesIO(png))) for png in (white.light, white.dark))
  assert light.shape == dark.shape and light[0, 0, 0] == 255 and dark[0, 0, 0] < 40
  both = (light[..., :3] == 255).all(-1) & (dark[..., :3] == 255).all(-1)  # the example
  assert both.sum() > 2000


def test_the_only_point_of_a_curve_is_seen(monkeypatch):
  monkeypatch.setattr(style, 'STYLES', [('#ff0000', 'solid')])
  (png,) = reporting.curve_pngs({'': {'step': [2], 'loss': [1.0]}})
  image = np.asarray(Image.open(io.BytesIO(png)).convert('RGB'), int)
  assert (image[..., 0] - image[..., 1:].max(-1) > 100).sum() > 50


def test_nans_are_a_gap(monkeypatch, num_points=600):  # which are smoothed
  monkeypatch.setattr(style, 'STYLES', [('#ff0000', 'solid')])

  def columns(loss):
    (png,) = reporting.curve_pngs({'': {'step': range(num_points), 'loss': loss}})
    image = np.asarray(Image.open(io.BytesIO(png)).convert('RGB'), int)
    return np.flatnonzero((image[..., 0] - image[..., 1:].max(-1) > 100).any(0))

  loss = np.linspace(5.0, 3.0, num_points)
  whole = columns(loss)
  third = num_points // 3
  assert np.diff(whole).max() == 1
  loss[third : 2 * third] = math.nan
  gaps = np.diff(columns(loss))
  # The segments that lead to the first and from the last missing point are gone too.
  assert 0.3 * len(whole) < gaps.max() < 0.4 * len(whole) and (gaps > 1).sum() == 1


def test_lines_can_be_told_apart():
  styles = style.line_styles('abcdef')
  assert list(styles) == list('abcdef') and len(set(styles.values())) == 6
  assert len({color for color, _ in style.line_styles(map(str, range(40))).values()}) == 40


def test_numbers_of_light_cells_of_a_grid_can_be_read():
  rows = [{'head': 'a', 'b': b, 's': 0, 'x': 88888888.0 * b} for b in (1, 2)]
  png = reporting.grid_png(rows, {'x': lambda row: row['x']})
  image = np.asarray(Image.open(io.BytesIO(png)).convert('RGB'), int)
  light = np.argwhere((abs(image - [253, 231, 37]) < 3).all(-1))
  top, left = light.min(0) + 5
  bottom, right = light.max(0) - 5
  assert (image[top:bottom, left:right].sum(-1) < 100).sum() > 50
