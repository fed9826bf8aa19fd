"""Heat maps over batch sizes and samples, a column a head: fig. 2 of Collier et al. 2023."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin.reporting import style

Row = Mapping[str, Any]


def grid_png(
  rows: Sequence[Row], measures: Mapping[str, Callable[[Row], float | None]], dpi: int = 110
) -> bytes:
  """A PNG with a line of panels a measure and a panel a head.

  Args:
    rows: with the keys head, b (batch) and s (samples; 0 for a head without); cells without a row
      and those whose measure is None are black.
    measures: {title: what to read from a row}.
    dpi: pixels an inch.
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
          ax.text(j, i, f'{value:.3g}', ha='center', va='center', color='white', fontsize=8)
      ax.set_xticks(range(len(batches)), batches)
      ax.set_yticks(range(len(samples)), [s or '–' for s in samples])
      ax.set_title(f'{head}: {title}', fontsize=10)
      ax.set_xlabel('batch')
      ax.set_ylabel('samples S')
  return style.to_png(figure, dpi)
