"""Results as a table, a JSON file, plots and one HTML page."""

from het_plugin.reporting.class_covariance import CovariancePanel, covariance_png
from het_plugin.reporting.files import write_json
from het_plugin.reporting.grid import grid_png
from het_plugin.reporting.lines import lines_png
from het_plugin.reporting.page import Figure, html_page
from het_plugin.reporting.plots import curves_png
from het_plugin.reporting.provenance import Provenance
from het_plugin.reporting.reliability import reliability_png
from het_plugin.reporting.text import aligned, text_table

__all__ = [
  'CovariancePanel',
  'Figure',
  'Provenance',
  'aligned',
  'covariance_png',
  'curves_png',
  'grid_png',
  'html_page',
  'lines_png',
  'reliability_png',
  'text_table',
  'write_json',
]
