"""Results as a table, a JSON file, plots and one HTML page."""

from het_plugin.reporting.charts import lines_png, scatter_png
from het_plugin.reporting.files import write_json
from het_plugin.reporting.grid import grid_png
from het_plugin.reporting.page import Figure, Table, html_page
from het_plugin.reporting.plots import curves_png
from het_plugin.reporting.provenance import Provenance
from het_plugin.reporting.text import aligned, text_table

__all__ = [
  'Figure',
  'Provenance',
  'Table',
  'aligned',
  'curves_png',
  'grid_png',
  'html_page',
  'lines_png',
  'scatter_png',
  'text_table',
  'write_json',
]
