"""Results as a table, a JSON file, plots and one HTML page."""

import importlib

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
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_MODULE_OF]


def __getattr__(name: str):
  if name in _MODULE_OF:
    return getattr(importlib.import_module(f'het_plugin.reporting.{_MODULE_OF[name]}'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
