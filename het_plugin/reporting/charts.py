"""Plots of many candidates as PNGs: curves of one quantity, and one quantity against another."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from het_plugin.reporting import style

Points = tuple[Sequence[float], Sequence[float]]

_MAX_LEGEND = 20  # lines; more would fill the figure


def lines_png(
  lines: Mapping[str, Points],
  *,
  xlabel: str,
  ylabel: str,
  log_x: bool = False,
  log_y: bool = False,
  whole_steps: bool = False,
  dpi: int = 110,
) -> bytes:
  """A line a candidate, from {name: (x, y)}; with few points, marked.

  Args:
    lines: one at least. Values that are not finite, or not positive on a logarithmic axis, are
      gaps.
    xlabel, ylabel: titles of the axes.
    log_x, log_y: logarithmic axes.
    whole_steps: a tick for each x of the lines.
    dpi: pixels an inch; the figure is 8 by 4.5 inches.
  """
  figure, ax = _figure(xlabel, ylabel)
  styles = style.line_styles(lines)
  for i, (name, (x, y)) in enumerate(lines.items()):
    marker = style.MARKERS[i % len(style.MARKERS)] if len(x) <= 30 else ''
    y = np.asarray(y, float)
    shown = np.isfinite(y) & ((y > 0) | (not log_y))
    color, dashes = styles[name]
    shown_y = np.where(shown, y, np.nan)
    ax.plot(x, shown_y, color=color, linestyle=dashes, marker=marker, markersize=5, label=name)
  ax.set(xscale='log' if log_x else 'linear', yscale='log' if log_y else 'linear')
  if whole_steps:
    ticks = sorted({value for x, _ in lines.values() for value in x})
    ax.set_xticks(ticks, map(str, ticks))
    ax.minorticks_off()
  if 1 < len(lines) <= _MAX_LEGEND:
    figure.legend(loc='outside right upper', frameon=False, fontsize=9)
  return style.to_png(figure, dpi)


def scatter_png(
  groups: Mapping[str, Points],
  names: Sequence[str],
  *,
  xlabel: str,
  ylabel: str,
  dpi: int = 110,
) -> bytes:
  """A point a candidate and group, from {group: (x [C], y [C])}.

  Args:
    groups: drawn in a colour and marker each.
    names: of the C candidates, written beside the points of the last group.
    xlabel, ylabel: titles of the axes.
    dpi: pixels an inch; the figure is 8 by 4.5 inches.
  """
  figure, ax = _figure(xlabel, ylabel)
  styles = style.line_styles(groups)
  for i, (group, (x, y)) in enumerate(groups.items()):
    color, _ = styles[group]
    ax.scatter(x, y, color=color, marker=style.MARKERS[i % len(style.MARKERS)], label=group)
  if len(names) <= _MAX_LEGEND:
    for name, where in zip(names, zip(x, y, strict=True), strict=True):
      ax.annotate(name, where, xytext=(5, 4), textcoords='offset points', fontsize=8)
  figure.legend(loc='outside right upper', frameon=False, fontsize=9)
  return style.to_png(figure, dpi)


def _figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
  figure = style.new_figure(8, 4.5)
  ax = figure.subplots()
  ax.set(xlabel=xlabel, ylabel=ylabel)
  style.plain_axes(ax)
  return figure, ax
