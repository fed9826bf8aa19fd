"""Few-shot accuracy against the number of shots, a panel a data set."""

import math
from collections.abc import Mapping

from het_plugin.reporting import style

# {run: {data set: {shots: (mean, standard error or None)}}}
Accuracies = Mapping[str, Mapping[str, Mapping[int, tuple[float, float | None]]]]

_COLUMNS = 3


def shots_png(accuracies: Accuracies, dpi: int = 130) -> bytes:
  """A PNG: shots on a logarithmic axis, accuracy with its standard error, a line a run.

  Args:
    accuracies: of each run; runs may lack data sets.
    dpi: pixels an inch.

  Raises:
    ValueError: there is nothing to draw.
  """
  datasets = list(dict.fromkeys(name for run in accuracies.values() for name in run))
  if not datasets:
    raise ValueError('accuracies holds no data set.')
  columns = min(_COLUMNS, len(datasets))
  lines = math.ceil(len(datasets) / columns)
  figure = style.new_figure(4.2 * columns, 3.2 * lines + 0.4)
  panels = figure.subplots(lines, columns, squeeze=False).ravel()
  for panel in panels[len(datasets) :]:
    panel.set_axis_off()
  handles, styles = {}, style.line_styles(accuracies)
  for panel, dataset in zip(panels, datasets, strict=False):
    shots = sorted({n for run in accuracies.values() for n in run.get(dataset, ())})
    for number, (run, by_dataset) in enumerate(accuracies.items()):
      cells = sorted(by_dataset.get(dataset, {}).items())
      if cells:
        color, dashes = styles[run]
        handles[run] = panel.errorbar(
          [n for n, _ in cells],
          [mean for _, (mean, _) in cells],
          yerr=[stderr or 0.0 for _, (_, stderr) in cells],
          color=color,
          linestyle=dashes,
          marker=style.MARKERS[number % len(style.MARKERS)],
          markersize=4,
          linewidth=1.4,
          capsize=2,
        )
    panel.set_xscale('log')
    panel.set_xticks(shots, [str(n) for n in shots])
    panel.minorticks_off()
    panel.set_title(dataset, loc='left', fontsize=11)
    panel.set_xlabel('shots')
    panel.set_ylabel('accuracy')
    style.plain_axes(panel)
  figure.legend(handles.values(), handles.keys(), loc='outside lower center', ncols=4, fontsize=9)
  return style.to_png(figure, dpi)
