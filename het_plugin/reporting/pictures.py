"""Pictures of examples: alone, with the correlations of their classes, and with predictions."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from het_plugin.reporting import style
from het_plugin.reporting.report import Picture

# Of about the same contrast on a white and on a dark page.
_BAR = '#3f7fc8'
_RIGHT = '#1a8a63'
_WRONG = '#d0571a'
_NAME_LENGTH = 40
_MATRIX_NAME_LENGTH = 14


def thumbnail_png(image: np.ndarray) -> bytes:
  """The PNG of an image, float [H, W, C], levels in [-1, 1], C 1 or 3, in its own pixels."""
  levels = np.round(np.clip(image + 1, 0, 2) * 127.5).astype(np.uint8)
  png = io.BytesIO()
  Image.fromarray(levels.squeeze(-1) if levels.shape[-1] == 1 else levels).save(png, 'PNG')
  return png.getvalue()


def covariance_png(
  image: np.ndarray,
  title: str,
  classes: Sequence[str],
  probability: np.ndarray,
  correlation: np.ndarray,
  anchor: str,
  neighbours: Sequence[tuple[str, float]],
) -> Picture:
  """Draws image, probabilities, correlation matrix in [-1, 1], and the list of neighbours.

  Args:
    image: float [H, W, C], levels in [-1, 1], C 1 or 3.
    title: above the picture.
    classes: names of the m most probable classes.
    probability, correlation: [m] of these classes, and [m, m] of their logits.
    anchor: a class.
    neighbours: (name, correlation) of the classes most correlated with the anchor, in order.
  """

  def draw() -> Figure:
    m = len(classes)
    figure = style.new_figure(10, 0.65 * m + 2.6)
    (image_ax, words), (bars, matrix) = figure.subplots(
      2, 2, width_ratios=(1, 2), height_ratios=(0.25 * m + 1, 0.4 * m + 1.6)
    )
    image_ax.imshow(np.clip((image + 1) / 2, 0, 1).squeeze(), cmap='gray', vmin=0, vmax=1)
    image_ax.set_axis_off()
    figure.suptitle(title, x=0.01, ha='left', fontsize=11)

    names = [_short(name) for name in classes]
    bars.barh(range(m), probability, color=_BAR)
    bars.set_yticks(range(m), names, fontsize=8, parse_math=False)
    bars.invert_yaxis()
    bars.set_xlim(0, 1)
    bars.set_title('probability', fontsize=10, loc='left')
    style.plain_axes(bars, grid=None)

    shown = matrix.imshow(correlation, cmap='RdBu_r', vmin=-1, vmax=1)
    for (i, j), value in np.ndenumerate(correlation):
      color = 'white' if abs(value) > 0.6 else 'black'
      text = matrix.text(j, i, f'{value:.2f}', ha='center', va='center', fontsize=7, color=color)
      text.set_in_layout(False)  # it lies within the matrix, so its size need not be measured
    columns = [_short(name, _MATRIX_NAME_LENGTH) for name in classes]
    matrix.set_xticks(range(m), columns, fontsize=7, rotation=90, parse_math=False)
    matrix.set_yticks(range(m), columns, fontsize=7, parse_math=False)
    matrix.set_title('correlation of their logits', fontsize=10, loc='left')
    figure.colorbar(shown, ax=matrix, shrink=0.8)

    words.set_axis_off()
    lines = [f'{value:+.3f}  {_short(name)}' for name, value in neighbours]
    words.text(0, 1, '\n'.join(lines), va='top', fontsize=8.5)
    words.set_title(f'most correlated with\n{_short(anchor)}', fontsize=9, loc='left')
    return figure

  return style.picture(draw, 110)


def _short(name: str, length: int = _NAME_LENGTH) -> str:
  return name if len(name) <= length else f'{name[: length - 1]}…'


Prediction = tuple[str, float, bool]  # class, probability, and whether it is right


def examples_png(
  images: np.ndarray,
  labels: Sequence[str],
  predictions: Mapping[str, Sequence[Prediction]],
) -> Picture:
  """Draws a column per example: its picture and label, and below them a line per model.

  Args:
    images: float [N, H, W, C], levels in [-1, 1], C 1 or 3.
    labels: of the examples, [N]; short, such as one character.
    predictions: {model: [N] predictions}.
  """

  def draw() -> Figure:
    lines = len(predictions)
    figure = style.new_figure(11, 1.5 + 0.55 * lines)
    grid = figure.add_gridspec(lines + 1, len(images), height_ratios=[2.2, *[1] * lines])
    axes = [figure.add_subplot(grid[0, i]) for i in range(len(images))]
    for ax, image, label in zip(axes, images, labels, strict=True):
      ax.imshow(np.clip((image + 1) / 2, 0, 1).squeeze(), cmap='gray', vmin=0, vmax=1)
      ax.set_title(label, fontsize=13)
    axes[0].set_ylabel('example, label above', rotation=0, ha='right', va='center', fontsize=10)
    for row, (model, found) in enumerate(predictions.items(), start=1):
      ax = figure.add_subplot(grid[row, :], xlim=(0, len(images)))
      for i, (what, probability, right) in zip(range(len(images)), found, strict=True):
        color = _RIGHT if right else _WRONG
        ax.text(i + 0.45, 0.5, what, color=color, fontsize=15, ha='right', va='center')
        ax.text(i + 0.55, 0.5, f'{probability:.0%}', color=color, fontsize=9, va='center')
      ax.set_ylabel(model, rotation=0, ha='right', va='center', fontsize=10)
      axes.append(ax)
    for ax in axes:
      ax.set_xticks([])
      ax.set_yticks([])
      ax.spines[:].set_visible(False)
    return figure

  return style.picture(draw, 130)
