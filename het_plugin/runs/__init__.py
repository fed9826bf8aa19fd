"""Runs: a model with parameters on a mesh, opened from what a training left or while it trains."""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:
  from het_plugin.runs.checkpoint import Checkpoint
  from het_plugin.runs.opening import Configuration, configuration, head_estimator, open_run
  from het_plugin.runs.run import Run

_MODULES = {
  'checkpoint': ('Checkpoint',),
  'opening': ('Configuration', 'configuration', 'head_estimator', 'open_run'),
  'run': ('Run',),
}

__all__ = [name for names in _MODULES.values() for name in names]
__getattr__ = faces.on_first_use(__name__, _MODULES)
