"""The configuration of a run under t5x, in the form that our commands read."""

from typing import Any

import jax
from absl import flags
from etils import epath

import gin
from het_plugin.config import changes, parsing, statements, uses
from het_plugin.system import run_files
from het_plugin.training import checkpoint_reader

_ENGINE = 'het_plugin/gin/t5x/train.gin'
_ENGINE_MODULE = 'het_plugin.hosts.t5x.engine'
_ACCEPT = 'summarize_config.accept_changes'  # of one start, so no setting of the run


def summarize_config(
  model_dir: epath.PathLike,
  summary_writer: Any | None,
  step: int,
  accept_changes: bool = False,
) -> None:
  """`summarize_config_fn` of t5x: writes t5x_config.gin, config.gin and a text summary.

  config.gin lacks bindings that only t5x knows, so our commands open the run's checkpoints without
  t5x.

  `summary_writer` is a writer of clu, or None for no summary. `step` is the step of the checkpoint
  that the run continues from, or 0 for a new run.

  Raises:
    ValueError: nothing uses a binding of the command line (`uses.check`); or the configuration may
      give other results, and `accept_changes` is False.
  """
  text = gin.config_str()
  uses.check(flags.FLAGS.flag_values_dict().get('gin_bindings', ()), text)  # t5x.train's flag
  folder = epath.Path(model_dir)
  run_files.check_links(folder)
  engine = statements.bindings(epath.Path(parsing.resolve(_ENGINE)).read_text())
  config = changes.RunConfig(
    statements.without(text, {*engine, _ACCEPT}, _ENGINE_MODULE),
    accept_changes,
    f'--gin.{_ACCEPT}=True',
  )
  before = folder / changes.CONFIG
  if step and before.exists():
    config.check(step, {'config': before.read_text()}, folder)
  if jax.process_index():
    return
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 't5x_config.gin').write_text(text)
  config.write(folder, step)
  if summary_writer is not None:
    summary_writer.write_texts(step, {'config': gin.markdown(text)})
    summary_writer.flush()


def summarize_evaluation(model_dir: epath.PathLike, summary_writer: Any | None, step: int) -> None:
  """`summarize_config_fn` of t5x.eval and t5x.infer: writes config.gin into the output directory.

  Raises:
    ValueError: the directory is a run's, whose config.gin our commands and a resumed run read.
  """
  del summary_writer, step
  folder = epath.Path(model_dir)
  folder.mkdir(parents=True, exist_ok=True)
  if checkpoint_reader.steps(folder):
    raise ValueError(
      f'output_dir={folder} holds a run, whose config.gin would be replaced: bind EVAL_OUTPUT_DIR '
      'or INFER_OUTPUT_DIR to another directory'
    )
  if not jax.process_index():
    (folder / changes.CONFIG).write_text(gin.config_str())
