"""Curves over the unit interval as a PNG, one line a name: risk-coverage and ROC curves."""

from collections.abc import Mapping

import numpy as np

from het_plugin.reporting import style

_MAX_POINTS = 2000  # more cannot be told apart, and would make the drawing slow


def unit_curves_png(
  curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
  *,
  title: str,
  x_label: str,
  y_label: str,
  diagonal: bool = False,
  dpi: int = 130,
) -> bytes:
  """A PNG of the curves.

  Args:
    curves: {name: (x [N], y [N])}, x ascending in [0, 1], y within [0, 1].
    title: of the plot.
    x_label, y_label: of the axes.
    diagonal: draws what guessing gives in an ROC plot, and the y axis up to 1.
    dpi: pixels per inch; the figure is 6.4 by 4.6 inches.

  Raises:
    ValueError: there is no curve.
  """
  if not curves:
    raise ValueError('there is no curve to draw')
  figure = style.new_figure(6.4, 4.6)
  ax = figure.subplots()
  if diagonal:
    ax.plot([0, 1], [0, 1], color='#aaaaaa', linewidth=0.9, linestyle=':')
  styles = style.line_styles(curves)
  for name, (x, y) in curves.items():
    color, dashes = styles[name]
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MAX_POINTS)).astype(int))
    ax.plot(x[kept], y[kept], color=color, linestyle=dashes, linewidth=1.7, label=name)
  ax.set_title(title, loc='left', fontsize=11)
  ax.set_xlabel(x_label)
  ax.set_ylabel(y_label)
  ax.set_xlim(0, 1)
  ax.set_ylim(0, 1.01 if diagonal else None)
  style.plain_axes(ax, grid='both')
  ax.legend(frameon=False, fontsize=9)
  for text in ax.get_legend().get_texts():
    text.set_parse_math(False)
  return style.to_png(figure, dpi)
