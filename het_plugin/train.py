"""Trains a model that gin files describe.

    python -m het_plugin.train --gin_file=gin/runs/glyphs_quickstart.gin \\
      --gin_file=gin/heads/het_xl.gin --gin.MODEL_DIR="'runs/het_xl'"

Run it again to go on where it stopped. Exit codes: 0 done; 1 a checkpoint cannot be written, or any
other failure; 2 a setting is wrong, or another training is in MODEL_DIR; 42 stopped by SIGTERM with
a checkpoint saved; 134 another process is lost or this one is stuck. 42 and 134 are to be started
again.
"""

from collections.abc import Sequence

import jax
from absl import app, flags

import gin
from het_plugin.config import changes, command_line, distributed, parsing, registry, train_flags
from het_plugin.operations import run_clock
from het_plugin.operations.verdict import Limits


def define_flags() -> None:
  command_line.define_flags()
  train_flags.define_flags()


def train_from_gin(
  accept_config_changes: bool = False,
  limits: Limits | None = None,
  began: float | None = None,
) -> tuple[int, object]:
  """Calls the gin-bound `train`: writes the configuration beside the checkpoints and into them.

  Args:
    accept_config_changes: resumes a run whose configuration has another meaning since.
    limits: how long to wait for processes that are dead or stuck; None for the defaults.
    began: `time.monotonic()` when this process began, where it does nothing else; None for now.

  Raises:
    ValueError: it has, and that is not accepted; and what `train` raises.
  """
  from het_plugin.training import train as train_lib

  config = changes.RunConfig(gin.config_str(), accept_config_changes)

  def write(model_dir: str, writer, step: int) -> None:
    if jax.process_index() == 0:
      writer.write_texts(step, {'gin_config': gin.markdown(config.text)})
      config.write(model_dir, step)

  return gin.get_configurable(train_lib.train)(
    limits=limits,
    began=began,
    summarize_config_fn=write,
    config=config.text,
    check_config_fn=config.check,
  )


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  with command_line.one_sentence_errors():
    distributed.initialize(watched=True)
    registry.register_trainer()
    parsing.parse_config(
      flags.FLAGS.gin_file, flags.FLAGS.gin_bindings, flags.FLAGS.gin_search_paths
    )
    limits = Limits(flags.FLAGS.heartbeat_timeout_seconds, flags.FLAGS.stall_timeout_seconds)
    train_from_gin(flags.FLAGS.accept_config_changes, limits, run_clock.process_start())


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
