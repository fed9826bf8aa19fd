"""Results as a table, a JSON file, plots and one HTML page."""

from het_plugin.reporting.columns import cell, p_text
from het_plugin.reporting.page import Figure, Table, html_page
from het_plugin.reporting.pictures import CovariancePanel, covariance_png, examples_png
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
from het_plugin.reporting.results import Provenance, write_json
from het_plugin.reporting.text import aligned, plain_table, text_table

__all__ = [
  'CovariancePanel',
  'Figure',
  'Progress',
  'Provenance',
  'Table',
  'aligned',
  'cell',
  'covariance_png',
  'curve_pngs',
  'examples_png',
  'grid_png',
  'html_page',
  'lines_png',
  'p_text',
  'plain_table',
  'reliability_png',
  'scatter_png',
  'shots_png',
  'text_table',
  'unit_curves_png',
  'write_json',
]
