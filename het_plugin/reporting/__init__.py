"""Results as a table, a JSON file, plots and one HTML page."""

from het_plugin.system import faces

_MODULES = {  # imported on first use: tables need no matplotlib
  'columns': ('Table', 'cell', 'counted', 'p_text', 'shots_text'),
  'pictures': ('covariance_png', 'examples_png', 'thumbnail_png'),
  'plots': (
    'curve_pngs',
    'grid_png',
    'lines_png',
    'reliability_png',
    'scatter_png',
    'shots_png',
    'unit_curves_png',
  ),
  'progress': ('Progress',),
  'report': ('Figure', 'Gallery', 'Picture', 'Report', 'Thumbnail'),
  'results': ('provenance', 'write_csv', 'write_json', 'write_table', 'written_here'),
  'text': ('aligned', 'plain_table'),
}

__all__ = [name for names in _MODULES.values() for name in names]
__getattr__ = faces.on_first_use(__name__, _MODULES)
