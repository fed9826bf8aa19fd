"""Trains a model that gin files describe.

    python -m het_plugin.train --gin_file=gin/runs/glyphs_vit.gin --gin_file=gin/heads/het_xl.gin \\
      --gin.MODEL_DIR="'runs/het_xl'"

Run it again to go on where it stopped. Exit codes: 0 done; 2 a setting is wrong; 42 stopped by
SIGTERM with a checkpoint saved.
"""

import functools
import hashlib
from collections.abc import Sequence

import jax
from absl import app, flags, logging

import gin
from het_plugin import configurables, distributed, gin_utils


def train_from_gin() -> tuple[int, object]:
  """Calls the gin-bound `train`: writes config.gin beside the checkpoints, and its fingerprint into
  them.
  """
  from het_plugin.training import train as train_lib

  configured = gin.get_configurable(train_lib.train)
  config = gin.config_str()
  return configured(
    summarize_config_fn=functools.partial(_write_config, config),
    config_fingerprint=hashlib.sha256(config.encode()).hexdigest(),
  )


def _write_config(config: str, model_dir: str, writer, step: int) -> None:
  from etils import epath

  if jax.process_index() != 0:
    return
  writer.write_texts(step, {'gin_config': gin.markdown(config)})
  path = epath.Path(model_dir) / 'config.gin'
  path.write_text(config)
  logging.info('The configuration is in %s.', path)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  with gin_utils.one_sentence_errors():
    distributed.initialize()
    configurables.register_trainer()
    gin_utils.parse_config(
      flags.FLAGS.gin_file, flags.FLAGS.gin_bindings, flags.FLAGS.gin_search_paths
    )
    train_from_gin()


if __name__ == '__main__':
  gin_utils.define_flags()
  distributed.define_flags()
  gin_utils.run(main)
