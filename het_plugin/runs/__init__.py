"""Runs: a model with parameters on a mesh, opened from what a training left or while it trains."""

from het_plugin.runs.checkpoint import Checkpoint
from het_plugin.runs.opening import Configuration, configuration, head_estimator, open_run
from het_plugin.runs.run import Run

__all__ = ['Checkpoint', 'Configuration', 'Run', 'configuration', 'head_estimator', 'open_run']
