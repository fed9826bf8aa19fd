"""The style of all plots, and their conversion to PNG."""

import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from matplotlib import colormaps, colors, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from het_plugin.reporting.report import Picture

# (colour, dashes): colours with a contrast of 4.5:1 on white; dashes tell lines apart without them.
STYLES = (
  ('#4a4a4a', 'solid'),
  ('#8a5a00', (0, (5, 1.5))),
  ('#1b5fad', 'solid'),
  ('#8b2f7f', (0, (5, 1.5))),
  ('#00704d', 'solid'),
  ('#b33c00', (0, (5, 1.5))),
)
# The colours of page.css in the dark.
_DARK = {
  **dict.fromkeys(('figure.facecolor', 'axes.facecolor'), '#15171a'),
  **dict.fromkeys(('text.color', 'axes.labelcolor', 'axes.edgecolor'), '#e6e8eb'),
  **dict.fromkeys(('xtick.color', 'ytick.color'), '#e6e8eb'),
}
MARKERS = 'osD^vP'


def line_styles(names: Iterable[str]) -> dict[str, tuple[str, Any]]:
  """{name: (colour, dashes)}, from `STYLES`, or from a colour scale for more names."""
  names = list(names)
  if len(names) <= len(STYLES):
    return dict(zip(names, STYLES, strict=False))
  scale = colormaps['viridis'](np.linspace(0, 0.88, len(names)))
  dashes = [dashes for _, dashes in STYLES]
  return {
    name: (colors.to_hex(color), dashes[i % len(dashes)])
    for i, (name, color) in enumerate(zip(names, scale, strict=True))
  }


def new_figure(width: float, height: float) -> Figure:
  """A figure of this many inches, without a window."""
  figure = Figure(figsize=(width, height), layout='constrained')
  FigureCanvasAgg(figure)
  return figure


def picture(draw: Callable[[], Figure], dpi: int) -> Picture:
  """Calls `draw` in the colours of each page; it draws text and axes in the default colour."""
  with rc_context(_DARK):
    dark = to_png(draw(), dpi)
  return Picture(to_png(draw(), dpi), dark)


def plain_axes(ax: Axes, grid: str | None = 'y') -> None:
  """Axes at the left and below, with pale lines across ('x', 'y', 'both' or none)."""
  ax.spines[['top', 'right']].set_visible(False)
  if grid:
    ax.grid(axis=grid, color='#dddddd', linewidth=0.7)


def to_png(figure: Figure, dpi: int) -> bytes:
  """The bytes of the PNG file at `dpi` pixels per inch."""
  # Names come from users, so a $ in them is not mathematics; labels of logarithmic ticks are.
  axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
  ticks = {label for axis in axes for label in axis.get_ticklabels(which='both')}
  for text in figure.findobj(Text):
    if text not in ticks:
      text.set_parse_math(False)
  png = io.BytesIO()
  with warnings.catch_warnings():
    # One for each letter, and for each time that it is drawn.
    warnings.filterwarnings('ignore', r'Glyph .* missing from font')
    figure.draw_without_rendering()  # places all, so that a legend of long names is not cut off
    figure.set_layout_engine('none')  # saving would place all once more
    whole = Bbox.union([figure.bbox_inches, figure.get_tightbbox()])
    figure.savefig(png, format='png', dpi=dpi, bbox_inches=whole)
  return png.getvalue()
