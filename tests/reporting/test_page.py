"""The plots and the HTML page."""

import html.parser
import io
import math

import numpy as np
import pytest
from PIL import Image

from het_plugin import reporting
from het_plugin.reporting import plots

VOID = {'meta', 'img'}
CURVES = {
  'DET': {'step': [1, 2, 3], 'loss': [5.0, 4.0, 3.0], 'tau': [1.0, 1.0, 1.0]},
  'HET-XL': {'step': [1, 2, 3], 'loss': [6.0, math.nan, 3.0]},
}


def test_curves_are_a_png_of_the_asked_resolution():
  image = Image.open(io.BytesIO(reporting.curves_png(CURVES, dpi=50)))
  assert image.size == (550, 210)
  colours = np.unique(np.asarray(image.convert('RGB')).reshape(-1, 3), axis=0)
  assert len(colours) > 10


def test_a_wide_range_and_a_single_point_can_be_drawn():
  reporting.curves_png({'a': {'step': range(500), 'loss': np.geomspace(1e-3, 1e3, 500)}}, dpi=30)
  reporting.curves_png({'a': {'step': [1], 'tau': [math.nan]}}, dpi=30)


@pytest.mark.parametrize(
  'curves,words',
  [
    ({}, 'neither of'),
    ({'DET': {'step': [1]}}, "heads: \\['DET'\\]"),
    ({'DET': {'step': [1, 2], 'loss': [1.0]}}, 'DET: 2 steps but 1 values of loss'),
  ],
)
def test_wrong_curves_are_an_error(curves, words):
  with pytest.raises(ValueError, match=words):
    reporting.curves_png(curves)


@pytest.mark.parametrize('heights', [[0.0, 0.0, 0.0], [0.99, 1.0, 1.0], [0.2, 0.5, 0.52], [0.5]])
def test_labels_are_pushed_apart_and_stay_inside(heights):
  gap = 0.055
  apart = plots._push_apart(heights, gap)
  assert all(0 <= height <= 1 for height in apart)
  assert all(b - a > gap - 1e-9 for a, b in zip(apart[:-1], apart[1:], strict=True))
  assert max(abs(a - b) for a, b in zip(heights, apart, strict=True)) <= gap * (len(heights) - 1)


class Page(html.parser.HTMLParser):
  """Checks that tags close in order; keeps the text and what is loaded from elsewhere."""

  def __init__(self, text):
    super().__init__()
    self.open, self.text, self.sources = [], [], []
    self.feed(text)
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.sources += [value for name, value in attrs if name in ('src', 'href')]
    if tag not in VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


def test_the_page_is_whole_escaped_and_needs_no_other_file():
  provenance = reporting.Provenance.of_this_process('het_plugin.quickstart', {'<b>': "x = '<y>'"})
  page = Page(
    reporting.html_page(
      title='a < b',
      introduction='& more',
      rows=[{'head': '<script>', 'nll': 1.0}, {'head': 'HET', 'nll': 2.0}],
      references=[{'head': 'chance', 'nll': 7.0}],
      notes=['note "one"'],
      figures=[reporting.Figure(reporting.curves_png(CURVES, dpi=30), 'cap<tion', 'alt "text"')],
      provenance=provenance,
    )
  )
  text = '\n'.join(page.text)
  for expected in ('a < b', '& more', '<script>', 'chance', 'note "one"', 'cap<tion', "x = '<y>'"):
    assert expected in text
  assert 'script' not in page.open
  assert all(source.startswith('data:image/png;base64,') for source in page.sources)
  assert len(page.sources) == 1


def test_provenance_names_the_command_and_the_versions():
  provenance = reporting.Provenance.of_this_process('het_plugin.quickstart', {})
  assert provenance.command.startswith('python -m het_plugin.quickstart')
  assert {'python', 'jax', 'flax'} <= set(provenance.versions)
