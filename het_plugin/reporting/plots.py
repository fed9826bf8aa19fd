"""Plots as PNGs: training curves, candidates, few-shot accuracies, calibration, grids."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from het_plugin.reporting import style
from het_plugin.reporting.columns import Row, shots_text

Curves = Mapping[str, Mapping[str, Sequence[float]]]

_PANELS = {
  'loss': 'loss (nats per example)',
  'tau': 'temperature tau',
  'precision_at_1': 'precision@1',
}
_SMOOTH_FRACTION = 0.02  # share of a curve's points in one moving average
_LOG_RATIO = 10.0  # a range wider than this gets a logarithmic axis


def curve_pngs(curves: Curves) -> list[bytes]:
  """PNGs of loss, temperature and precision against the step, one line per head.

  Curves are {head: {'step': [N], 'loss': [N], 'tau': [N], 'precision_at_1': [N]}}; all but 'step'
  may be missing, and NaNs are gaps.
  """
  styles = style.line_styles(curves)
  pngs = []
  for name in _PANELS:
    lines = {head: (c['step'], c[name]) for head, c in curves.items() if name in c}
    if lines:
      figure = style.new_figure(5.5, 5.6)
      _panel(figure.subplots(), name, lines, styles)
      pngs.append(style.to_png(figure, 160))
  return pngs


def _panel(ax: Axes, name: str, lines: Mapping, styles: Mapping) -> None:
  lows = []
  highs = []
  for head, (step, values) in lines.items():
    step = np.asarray(step, float)
    values = np.asarray(values, float)
    color, dashes = styles[head]
    smooth = _smooth(values)
    if len(values) > 2 and not np.array_equal(smooth, values, equal_nan=True):
      ax.plot(step, values, color=color, alpha=0.18, linewidth=0.8)
    finite = smooth[np.isfinite(smooth)]
    look = {'color': color, 'linestyle': dashes, 'linewidth': 1.8}
    # One point, as after a first evaluation, makes no line.
    ax.plot(step, smooth, marker='o' if finite.size == 1 else None, label=head, **look)
    if finite.size:
      lows.append(finite.min())
      highs.append(finite.max())
  if lows and min(lows) > 0 and max(highs) / min(lows) > _LOG_RATIO:
    ax.set_yscale('log')
  ax.set_xlabel('step', fontsize=11)
  ax.set_ylabel(_PANELS[name], fontsize=11)
  ax.xaxis.set_major_formatter('{x:,.0f}')
  style.plain_axes(ax)
  ax.margins(x=0)
  if len(lines) > 1:
    ax.legend(framealpha=0.9, edgecolor='none', fontsize=9)


def _smooth(values: np.ndarray) -> np.ndarray:
  """Centred moving average over _SMOOTH_FRACTION of the points, with shorter windows at the ends.

  A NaN stays NaN and does not count in the averages of its neighbours.
  """
  half = int(len(values) * _SMOOTH_FRACTION / 2)
  if not half:
    return values
  kernel = np.ones(2 * half + 1)
  known = np.isfinite(values)
  total = np.convolve(np.where(known, values, 0.0), kernel, 'same')
  count = np.convolve(known, kernel, 'same')
  return np.divide(total, count, out=np.full_like(total, np.nan), where=known)


Points = tuple[Sequence[float], Sequence[float]]

_MAX_LEGEND = 20  # lines; more would fill the figure
_MAX_POINTS = 2000  # more cannot be told apart, and would make the drawing slow


def lines_png(
  lines: Mapping[str, Points],
  *,
  xlabel: str,
  ylabel: str,
  log_x: bool = False,
  log_y: bool = False,
  whole_steps: bool = False,
) -> bytes:
  """A line per candidate, from {name: (x, y)}; lines of few points get markers.

  Values that are not finite, or not positive on a logarithmic axis, are gaps. With `whole_steps`
  there is a tick for each x.
  """
  figure, ax = _figure(xlabel, ylabel)
  for i, (name, (color, dashes)) in enumerate(style.line_styles(lines).items()):
    x = lines[name][0]
    y = np.asarray(lines[name][1], float)
    marker = style.MARKERS[i % len(style.MARKERS)] if len(x) <= 30 else ''
    y = np.where(np.isfinite(y) & ((y > 0) | (not log_y)), y, np.nan)
    ax.plot(x, y, color=color, linestyle=dashes, marker=marker, markersize=5, label=name)
  ax.set(xscale='log' if log_x else 'linear', yscale='log' if log_y else 'linear')
  if whole_steps:
    ticks = sorted({value for x, _ in lines.values() for value in x})
    ax.set_xticks(ticks, map(str, ticks))
    ax.minorticks_off()
  if 1 < len(lines) <= _MAX_LEGEND:
    figure.legend(loc='outside right upper', frameon=False, fontsize=9)
  return style.to_png(figure, 110)


def scatter_png(
  groups: Mapping[str, Points],
  names: Sequence[str],
  *,
  xlabel: str,
  ylabel: str,
) -> bytes:
  """A point per candidate and group, from {group: (x [C], y [C])}; names [C] are beside the points
  of the last group.
  """
  figure, ax = _figure(xlabel, ylabel)
  for i, (group, (color, _)) in enumerate(style.line_styles(groups).items()):
    x, y = groups[group]
    ax.scatter(x, y, color=color, marker=style.MARKERS[i % len(style.MARKERS)], label=group)
  if len(names) <= _MAX_LEGEND:
    for name, where in zip(names, zip(x, y, strict=True), strict=True):
      ax.annotate(name, where, xytext=(5, 4), textcoords='offset points', fontsize=8)
  figure.legend(loc='outside right upper', frameon=False, fontsize=9)
  return style.to_png(figure, 110)


def unit_curves_png(
  curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
  *,
  title: str,
  x_label: str,
  y_label: str,
  diagonal: bool = False,
) -> bytes:
  """Curves {name: (x [N], y [N])} within the unit square, x ascending.

  `diagonal` draws the line of guessing in an ROC plot, and the y axis up to 1.
  """
  figure, ax = _figure(x_label, y_label)
  if diagonal:
    ax.plot([0, 1], [0, 1], color='#aaaaaa', linewidth=0.9, linestyle=':')
  for name, (color, dashes) in style.line_styles(curves).items():
    x, y = curves[name]
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MAX_POINTS)).astype(int))
    ax.plot(x[kept], y[kept], color=color, linestyle=dashes, linewidth=1.7, label=name)
  ax.set_title(title, loc='left', fontsize=11)
  ax.set_xlim(0, 1)
  ax.set_ylim(0, 1.01 if diagonal else None)
  ax.legend(frameon=False, fontsize=9)
  return style.to_png(figure, 130)


def _figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
  figure = style.new_figure(8, 4.5)
  ax = figure.subplots()
  ax.set(xlabel=xlabel, ylabel=ylabel)
  style.plain_axes(ax)
  return figure, ax


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
  """A figure of panels of this size in inches, three side by side."""
  columns = min(3, count)
  rows = -(-count // columns)
  figure = style.new_figure(width * columns, height * rows)
  axes = figure.subplots(rows, columns, squeeze=False).ravel()
  for ax in axes[count:]:
    ax.set_axis_off()
  return figure, list(axes[:count])


def shots_png(rows: Sequence[Row]) -> bytes:
  """Accuracy with its standard error against shots, a line per row and a panel per data set.

  Rows have name, fewshot and fewshot_stderr, {data set: {shots: value}} (see `columns`).
  """
  datasets = list(dict.fromkeys(name for row in rows for name in row['fewshot']))
  styles = style.line_styles(row['name'] for row in rows)
  figure, panels = _panels(len(datasets), 4.2, 3.5)
  handles = {}
  for panel, dataset in zip(panels, datasets, strict=True):
    for row, marker in zip(rows, itertools.cycle(style.MARKERS), strict=False):
      accuracy = row['fewshot'].get(dataset, {})
      if accuracy:
        shots = sorted(accuracy)
        color, dashes = styles[row['name']]
        handles[row['name']] = panel.errorbar(
          shots,
          [accuracy[n] for n in shots],
          yerr=[row['fewshot_stderr'][dataset][n] or 0.0 for n in shots],
          color=color,
          linestyle=dashes,
          marker=marker,
          markersize=4,
          linewidth=1.4,
          capsize=2,
        )
    shots = sorted({n for row in rows for n in row['fewshot'].get(dataset, ())})
    panel.set_xscale('log')
    panel.set_xticks(shots, [shots_text(n, '') for n in shots])
    panel.minorticks_off()
    panel.set_title(dataset, loc='left', fontsize=11)
    panel.set(xlabel='shots', ylabel='accuracy')
    style.plain_axes(panel)
  figure.legend(handles.values(), handles.keys(), loc='outside lower center', ncols=4, fontsize=9)
  return style.to_png(figure, 130)


def reliability_png(diagrams: Mapping[str, Any]) -> bytes:
  """A reliability diagram per name (Guo et al. 2017, fig. 1); there must be one.

  Diagrams have count, mean confidence and accuracy of each bin, [M]; NaN where a bin is empty.
  Bars show the accuracy in equal bins of confidence. Dots lie at the mean confidence of a bin, with
  an area by its share of the examples. The diagonal is perfect calibration.
  """
  figure, axes = _panels(len(diagrams), 3.6, 3.6)
  for ax, (name, bins) in zip(axes, diagrams.items(), strict=True):
    num_bins = len(bins.count)
    left = np.arange(num_bins) / num_bins
    ax.bar(left, bins.accuracy, 1 / num_bins, align='edge', color='#c7d8ec', edgecolor='white')
    ax.plot([0, 1], [0, 1], color='#8a8a8a', linewidth=0.9, linestyle=':')
    share = bins.count / max(bins.count.sum(), 1)
    ax.scatter(bins.confidence, bins.accuracy, 20 + 300 * share, '#1b5fad', alpha=0.85, zorder=3)
    ax.set_title(name, loc='left', fontsize=10)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel='confidence', ylabel='accuracy')
    style.plain_axes(ax, grid=None)
  return style.to_png(figure, 110)


def grid_png(rows: Sequence[Row], measures: Mapping[str, Callable[[Row], float | None]]) -> bytes:
  """Heat maps over batch sizes and samples (fig. 2): a row per measure, a column per head.

  Args:
    rows: with the keys head, b (batch) and s (samples; 0 for a head without); cells without a row
      or with a measure of None are black.
    measures: {title: what to read from a row}.
  """
  heads = list(dict.fromkeys(row['head'] for row in rows))
  batches = sorted({row['b'] for row in rows})
  figure = style.new_figure(3.2 * len(heads), 3 * len(measures))
  axes = figure.subplots(len(measures), len(heads), squeeze=False)
  for line, (title, measure) in zip(axes, measures.items(), strict=True):
    values = {(row['head'], row['s'], row['b']): measure(row) for row in rows}
    present = [value for value in values.values() if value is not None] or [0.0]
    for ax, head in zip(line, heads, strict=True):
      samples = sorted({row['s'] for row in rows if row['head'] == head})
      cells = [[values.get((head, s, b)) for b in batches] for s in samples]
      table = np.array([[np.nan if x is None else x for x in row] for row in cells], float)
      ax.set_facecolor('black')
      ax.imshow(table, origin='lower', aspect='auto', vmin=min(present), vmax=max(present))
      for (i, j), value in np.ndenumerate(table):
        if np.isfinite(value):
          light = value > (min(present) + max(present)) / 2  # the cell
          colour = 'black' if light else 'white'
          ax.text(j, i, f'{value:.3g}', ha='center', va='center', color=colour, fontsize=8)
      ax.set_xticks(range(len(batches)), batches)
      ax.set_yticks(range(len(samples)), [s or '–' for s in samples])
      ax.set_title(f'{head}: {title}', fontsize=10)
      ax.set_xlabel('batch')
      ax.set_ylabel('samples S')
  return style.to_png(figure, 110)
