"""Reliability diagrams as a PNG, a panel a model (Guo et al. 2017, fig. 1)."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from het_plugin.reporting import style

_COLUMNS = 3


class Bins(Protocol):
  """count, mean confidence and accuracy of each bin, [M]; NaN where a bin is empty."""

  count: np.ndarray
  confidence: np.ndarray
  accuracy: np.ndarray


def reliability_png(diagrams: Mapping[str, Bins], dpi: int = 110) -> bytes:
  """A PNG with a panel a name: bars of accuracy over equal bins of confidence, dots at the mean
  confidence of each bin with areas by its share of the examples, and the diagonal of perfect
  calibration.

  Raises:
    ValueError: there is no diagram.
  """
  if not diagrams:
    raise ValueError('there is no reliability diagram to draw')
  num_columns = min(_COLUMNS, len(diagrams))
  num_lines = -(-len(diagrams) // num_columns)
  figure = style.new_figure(3.6 * num_columns, 3.6 * num_lines)
  axes = figure.subplots(num_lines, num_columns, squeeze=False).flat
  for ax, (name, bins) in zip(axes, diagrams.items(), strict=False):
    num_bins = len(bins.count)
    left = np.arange(num_bins) / num_bins
    ax.bar(left, bins.accuracy, 1 / num_bins, align='edge', color='#c7d8ec', edgecolor='white')
    ax.plot([0, 1], [0, 1], color='#8a8a8a', linewidth=0.9, linestyle=':')
    share = bins.count / max(bins.count.sum(), 1)
    ax.scatter(bins.confidence, bins.accuracy, 20 + 300 * share, '#1b5fad', alpha=0.85, zorder=3)
    ax.set_title(name, loc='left', fontsize=10, parse_math=False)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1.02)
    ax.set_xlabel('confidence', fontsize=9)
    ax.set_ylabel('accuracy', fontsize=9)
    style.plain_axes(ax, grid=None)
  for ax in list(axes)[len(diagrams) :]:
    ax.set_visible(False)
  return style.to_png(figure, dpi)
