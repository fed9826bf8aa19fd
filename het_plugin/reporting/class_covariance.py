"""An image, its most probable classes and the correlations of their logits, as a PNG."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from het_plugin.reporting import style

_NAME_LENGTH = 40


@dataclasses.dataclass(frozen=True, eq=False)
class CovariancePanel:
  """What is drawn of one image.

  Attributes:
    image: float [H, W, C], levels in [-1, 1], C 1 or 3.
    title: of the picture, such as the true class.
    classes: names of the m most probable classes.
    probability: [m] of these.
    correlation: [m, m] of their logits.
    anchor: the class that the list below is for.
    neighbours: (name, correlation) of the classes most correlated with the anchor, in order.
  """

  image: np.ndarray
  title: str
  classes: Sequence[str]
  probability: np.ndarray
  correlation: np.ndarray
  anchor: str
  neighbours: Sequence[tuple[str, float]]


def covariance_png(panel: CovariancePanel, dpi: int = 110) -> bytes:
  """A PNG: image, probabilities, correlation matrix in [-1, 1], and the list of neighbours."""
  m = len(panel.classes)
  figure = style.new_figure(15, 0.42 * m + 1.6)
  image_ax, bars, matrix, words = figure.subplots(1, 4, width_ratios=(1, 1.1, 1.1, 1.6))
  image_ax.imshow(np.clip((panel.image + 1) / 2, 0, 1).squeeze(), cmap='gray', vmin=0, vmax=1)
  image_ax.set_axis_off()
  figure.suptitle(panel.title, x=0.01, ha='left', fontsize=11, parse_math=False)

  names = [_short(name) for name in panel.classes]
  bars.barh(range(m), panel.probability, color='#1b5fad')
  bars.set_yticks(range(m), names, fontsize=8, parse_math=False)
  bars.invert_yaxis()
  bars.set_xlim(0, 1)
  bars.set_title('probability', fontsize=10, loc='left')
  style.plain_axes(bars, grid=None)

  shown = matrix.imshow(panel.correlation, cmap='RdBu_r', vmin=-1, vmax=1)
  for (i, j), value in np.ndenumerate(panel.correlation):
    color = 'white' if abs(value) > 0.6 else 'black'
    matrix.text(j, i, f'{value:.2f}', ha='center', va='center', fontsize=7, color=color)
  matrix.set_xticks([])
  matrix.set_yticks([])
  matrix.set_title('correlation of their logits, same order', fontsize=10, loc='left')
  figure.colorbar(shown, ax=matrix, shrink=0.8)

  words.set_axis_off()
  lines = [f'{value:+.3f}  {_short(name)}' for name, value in panel.neighbours]
  words.text(0, 1, '\n'.join(lines), va='top', fontsize=8.5, parse_math=False)
  words.set_title(
    f'most correlated with\n{_short(panel.anchor)}', fontsize=9, loc='left', parse_math=False
  )
  return style.to_png(figure, dpi)


def _short(name: str) -> str:
  return name if len(name) <= _NAME_LENGTH else f'{name[: _NAME_LENGTH - 1]}…'
