"""Results as a table, a JSON file, plots and one HTML page."""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:  # imported on first use: tables need no matplotlib
  from het_plugin.reporting.columns import Table, cell, counted, fewshot_fields, p_text, shots_text
  from het_plugin.reporting.pictures import covariance_png, examples_png, thumbnail_png
  from het_plugin.reporting.plots import (
    curve_pngs,
    grid_png,
    lines_png,
    reliability_png,
    scatter_png,
    shots_png,
    unit_curves_png,
  )
  from het_plugin.reporting.progress import Progress
  from het_plugin.reporting.report import Figure, Gallery, Picture, Report, Thumbnail
  from het_plugin.reporting.results import (
    provenance,
    write_csv,
    write_json,
    write_table,
    written_here,
  )
  from het_plugin.reporting.text import aligned, plain_table

__getattr__, __all__ = faces.on_first_use(__name__)
