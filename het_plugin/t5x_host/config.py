"""The configuration of a run under t5x, as our mains read it."""

from typing import Any

import jax
from etils import epath

import gin
from het_plugin.config import changes, parsing

_ENGINE = 'het_plugin/gin/t5x/train.gin'
_ENGINE_MODULE = 'het_plugin.t5x_host.engine'


def summarize_config(model_dir: epath.PathLike, summary_writer: Any | None, step: int) -> None:
  """`summarize_config_fn` of t5x: writes MODEL_DIR/t5x_config.gin and a text summary; and without
  what only t5x knows MODEL_DIR/config.gin.

  With that our mains take the run's checkpoints, where there is no t5x too.
  """
  if jax.process_index():
    return
  text = gin.config_str()
  folder = epath.Path(model_dir)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 't5x_config.gin').write_text(text)
  engine = changes.bindings(epath.Path(parsing.resolve(_ENGINE)).read_text())
  (folder / changes.CONFIG).write_text(changes.without(text, set(engine), _ENGINE_MODULE))
  if summary_writer is not None:
    summary_writer.write_texts(step, {'config': gin.markdown(text)})
    summary_writer.flush()
