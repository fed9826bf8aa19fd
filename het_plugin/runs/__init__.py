"""Runs: a model with parameters on a mesh, opened from what a training left or while it trains."""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:
  from het_plugin.runs import opening, per_example, run, sources, unfinished
  from het_plugin.runs.checkpoint import Checkpoint
  from het_plugin.runs.opening import Configuration, configuration, head_estimator, open_run
  from het_plugin.runs.run import Run

__getattr__, __all__ = faces.on_first_use(__name__)
