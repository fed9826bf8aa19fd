"""The configuration of a run under t5x, as our mains read it."""

from typing import Any

import jax
from etils import epath

import gin
from het_plugin import config_changes, gin_utils, t5x_host

_ENGINE = 'het_plugin/gin/t5x/train.gin'


def summarize_config(model_dir: epath.PathLike, summary_writer: Any | None, step: int) -> None:
  """`summarize_config_fn` of t5x: the whole configuration becomes MODEL_DIR/t5x_config.gin and a text summary; what
  no host knows better than another, MODEL_DIR/config.gin.

  So `python -m het_plugin.evaluate` and all other mains take the run's checkpoints, where there is no t5x too.
  """
  if jax.process_index():
    return
  text = gin.config_str()
  folder = epath.Path(model_dir)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 't5x_config.gin').write_text(text)
  engine = config_changes.bindings(epath.Path(gin_utils.resolve(_ENGINE)).read_text())
  (folder / config_changes.CONFIG).write_text(
    config_changes.without(text, set(engine), t5x_host.__name__)
  )
  if summary_writer is not None:
    summary_writer.write_texts(step, {'config': gin.markdown(text)})
    summary_writer.flush()
