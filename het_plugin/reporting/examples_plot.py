"""Examples with what each model predicts for them, as a PNG."""

from collections.abc import Mapping, Sequence

import numpy as np

from het_plugin.reporting import style

Prediction = tuple[str, float, bool]  # what, with which probability, and whether it is right


def examples_png(
  images: np.ndarray,
  truths: Sequence[str],
  predictions: Mapping[str, Sequence[Prediction]],
  dpi: int = 130,
) -> bytes:
  """A PNG with a column per example: its picture and truth, and below them a line per model.

  Args:
    images: float [N, H, W, C], levels in [-1, 1], C 1 or 3.
    truths: what the examples are, [N]; short, such as one character.
    predictions: {model: [N] predictions}.
    dpi: pixels per inch; the figure is 11 inches wide.
  """
  lines = len(predictions)
  figure = style.new_figure(11, 1.5 + 0.55 * lines)
  ratios = [2.2, *[1] * lines]
  axes = figure.subplots(lines + 1, len(images), height_ratios=ratios, squeeze=False)
  for ax, image, truth in zip(axes[0], images, truths, strict=True):
    ax.imshow(np.clip((image + 1) / 2, 0, 1).squeeze(), cmap='gray', vmin=0, vmax=1)
    ax.set_title(truth, fontsize=13, parse_math=False)
  for row, (model, found) in zip(axes[1:], predictions.items(), strict=True):
    for ax, (what, probability, right) in zip(row, found, strict=True):
      color = '#00704d' if right else '#b33c00'
      ax.text(0.45, 0.5, what, color=color, fontsize=15, ha='right', va='center', parse_math=False)
      ax.text(0.55, 0.5, f'{probability:.0%}', color=color, fontsize=9, va='center')
    row[0].set_ylabel(model, rotation=0, ha='right', va='center', fontsize=10, parse_math=False)
  axes[0, 0].set_ylabel('example, truth above', rotation=0, ha='right', va='center', fontsize=10)
  for ax in axes.flat:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
  return style.to_png(figure, dpi)
