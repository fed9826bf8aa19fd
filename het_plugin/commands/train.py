"""Trains a model that gin files describe.

    python -m het_plugin.train --gin_file=gin/runs/glyphs.gin \\
      --gin_file=gin/heads/het_xl.gin --gin.MODEL_DIR="'runs/het_xl'"

To continue after an interruption, run it again. Exit codes:

  0    done
  1    a checkpoint cannot be written, or another failure
  2    a setting is wrong, or MODEL_DIR has another training
  3    a step was not finite
  42   stopped by SIGTERM or Ctrl-C with a checkpoint saved: start it again
  130  stopped by a second Ctrl-C, with nothing saved
  134  another process is lost, or this one is stuck: start it again
"""

import dataclasses

from het_plugin.cli.settings import Gin, Processes
from het_plugin.system import stopping
from het_plugin.system.ranges import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, Processes):
  """What gin does not say of a training.

  Attributes:
    stall_timeout_seconds: How long training may make no progress before its processes end: more
      than the longest compilation, restore or action takes.
    accept_config_changes: Resumes a run although its configuration may now give other results; the
      old one is kept.
  """

  stall_timeout_seconds: Count = 1800
  accept_config_changes: bool = False


def run(settings: Settings) -> None:
  """Trains."""
  # Not at the top, because --help needs none of them.
  import gin
  from het_plugin.config import parsing, uses
  from het_plugin.operations import operations
  from het_plugin.runs import starting

  operations.collect_garbage_later()
  settings.join()
  parsing.parse_config(*settings.gin)
  uses.check(settings.gin_bindings, gin.config_str())
  observer = operations.Operations(settings.stall_timeout_seconds, stopping.BEGAN)
  starting.train_from_gin(settings.accept_config_changes, observer)
