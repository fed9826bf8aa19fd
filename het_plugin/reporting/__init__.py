"""Results as a table, a JSON file, plots and one HTML page."""

from het_plugin.reporting.charts import lines_png, scatter_png
from het_plugin.reporting.class_covariance import CovariancePanel, covariance_png
from het_plugin.reporting.columns import p_text
from het_plugin.reporting.examples_plot import examples_png
from het_plugin.reporting.files import write_json
from het_plugin.reporting.grid import grid_png
from het_plugin.reporting.page import Figure, Table, html_page
from het_plugin.reporting.plots import curves_png
from het_plugin.reporting.progress import Progress
from het_plugin.reporting.provenance import Provenance
from het_plugin.reporting.reliability import reliability_png
from het_plugin.reporting.shots_plot import shots_png
from het_plugin.reporting.text import aligned, plain_table, text_table
from het_plugin.reporting.unit_curves import unit_curves_png

__all__ = [
  'CovariancePanel',
  'Figure',
  'Progress',
  'Provenance',
  'Table',
  'aligned',
  'covariance_png',
  'curves_png',
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
