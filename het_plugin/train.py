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

from het_plugin.system import stopping

if __name__ == '__main__':
  stopping.install()  # the imports below take seconds

from collections.abc import Sequence

from absl import flags

from het_plugin.cli import command_line, training_flags
from het_plugin.system import distributed


def define_flags() -> None:
  command_line.define_flags()
  training_flags.define_flags()


def main(argv: Sequence[str]) -> None:
  with command_line.one_sentence_errors(argv):
    # Not at the top, because --help needs none of them.
    import gin
    from het_plugin.config import parsing, uses
    from het_plugin.operations import operations
    from het_plugin.runs import starting

    operations.collect_garbage_later()
    distributed.initialize()
    files, typed, search_paths = command_line.gin_settings()
    parsing.parse_config(files, typed, search_paths)
    uses.check(typed, gin.config_str())
    observer = operations.Operations(flags.FLAGS.stall_timeout_seconds, stopping.BEGAN)
    starting.train_from_gin(flags.FLAGS.accept_config_changes, observer)


if __name__ == '__main__':
  command_line.run(main)
