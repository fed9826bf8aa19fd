"""Training curves as a PNG: one panel for the loss, one for the temperature."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from het_plugin.reporting import style

Curves = Mapping[str, Mapping[str, Sequence[float]]]

_PANELS = {'loss': 'training loss (nats per example)', 'tau': 'temperature tau'}
_SMOOTH_FRACTION = 0.02  # of a curve's points, in one moving average
_LOG_RATIO = 10.0  # a range wider than this gets a logarithmic axis
_LABEL_GAP = 0.045  # of the axis height, between two labels


def curves_png(curves: Curves, dpi: int = 160) -> bytes:
  """Loss and temperature against the step, one line per head, labelled at its end.

  Args:
    curves: {head: {'step': [N], 'loss': [N], 'tau': [N]}}; 'loss' or 'tau' may be missing. NaNs are
      gaps.
    dpi: pixels per inch; the figure is 11 inches wide.

  Returns:
    The PNG file's bytes.

  Raises:
    ValueError: there is no curve, or a curve's length is not that of its steps.
  """
  panels = [name for name in _PANELS if any(name in curve for curve in curves.values())]
  if not panels:
    raise ValueError(f'curves has neither of {list(_PANELS)} for any head; heads: {list(curves)}.')
  figure = style.new_figure(11, 5.6)
  styles = style.line_styles(curves)
  for ax, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
    _panel(ax, name, {h: (c['step'], c[name]) for h, c in curves.items() if name in c}, styles)
  return style.to_png(figure, dpi)


def _panel(ax: Axes, name: str, lines: Mapping, styles: Mapping) -> None:
  ends, lows, highs = {}, [], []
  for head, (step, values) in lines.items():
    step, values = np.asarray(step, float), np.asarray(values, float)
    if step.shape != values.shape:
      raise ValueError(f'{head}: {len(step)} steps but {len(values)} values of {name}.')
    color, dashes = styles[head]
    smooth = _smooth(values)
    if len(values) > 2 and not np.array_equal(smooth, values, equal_nan=True):
      ax.plot(step, values, color=color, alpha=0.18, linewidth=0.8)
    ax.plot(step, smooth, color=color, linestyle=dashes, linewidth=1.8)
    finite = smooth[np.isfinite(smooth)]
    if finite.size:
      ends[head] = finite[-1]
      lows.append(finite.min())
      highs.append(finite.max())
  if lows and min(lows) > 0 and max(highs) / min(lows) > _LOG_RATIO:
    ax.set_yscale('log')
  ax.set_xlabel('step', fontsize=11)
  ax.set_ylabel(_PANELS[name], fontsize=11)
  ax.xaxis.set_major_formatter('{x:,.0f}')
  style.plain_axes(ax)
  ax.margins(x=0)
  _label_ends(ax, ends, styles)


def _smooth(values: np.ndarray) -> np.ndarray:
  """Centred moving average over _SMOOTH_FRACTION of the points, shorter windows at the ends. A NaN
  stays one and counts for nothing in its neighbours' averages.
  """
  half = int(len(values) * _SMOOTH_FRACTION / 2)
  if not half:
    return values
  kernel = np.ones(2 * half + 1)
  known = np.isfinite(values)
  total = np.convolve(np.where(known, values, 0.0), kernel, 'same')
  count = np.convolve(known, kernel, 'same')
  return np.divide(total, count, out=np.full_like(total, np.nan), where=known)


def _label_ends(ax: Axes, ends: Mapping[str, float], styles: Mapping) -> None:
  """Writes each head's name right of its line's end, pushed apart where ends meet."""
  ax.autoscale_view()  # transData is only up to date afterwards
  to_axes = ax.transData + ax.transAxes.inverted()
  heads = sorted(ends, key=ends.get)
  wanted = [to_axes.transform((1.0, ends[head]))[1] for head in heads]
  for head, height in zip(heads, _push_apart(wanted, _LABEL_GAP), strict=True):
    ax.annotate(
      head,
      xy=(1.0, height),
      xycoords='axes fraction',
      xytext=(6, 0),
      textcoords='offset points',
      color=styles[head][0],
      fontsize=9.5,
      va='center',
      annotation_clip=False,
    )


def _push_apart(heights: Sequence[float], gap: float) -> list[float]:
  """Ascending heights in [0, 1], moved as little as need be to lie `gap` apart."""
  runs: list[list[float]] = []  # [centre, members]
  for height in heights:
    runs.append([height, 1])
    while len(runs) > 1 and runs[-1][0] - runs[-2][0] < gap * (runs[-1][1] + runs[-2][1]) / 2:
      (low, n), (high, m) = runs[-2:]
      runs[-2:] = [[(low * n + high * m) / (n + m), n + m]]
  apart = [
    centre + gap * (i - (members - 1) / 2) for centre, members in runs for i in range(members)
  ]
  room_above = [1 - gap * (len(apart) - 1 - i) for i in range(len(apart))]
  return [max(gap * i, min(room_above[i], height)) for i, height in enumerate(apart)]
