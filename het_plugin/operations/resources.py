"""Room on the disk for checkpoints, before anything is compiled; sentences for a full one."""

import errno
import logging
import math
import shutil
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from het_plugin.training import checkpoint_reader, checkpoints, processes, run_files

_log = logging.getLogger(__name__)

PyTree = Any
_COMPRESSED = 0.9  # zstd takes 7% off float32 weights
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check(
  state: PyTree,
  save_cfg: checkpoints.SaveCheckpointConfig | None,
  model_dir: epath.PathLike,
  total_steps: int,
) -> None:
  """Warns where a run's checkpoints are likely to run out of room; all processes call it.

  Args:
    state: the train state as shapes.
    save_cfg: None for a run that saves nothing.
    model_dir: its directory.
    total_steps: of the run.

  Raises:
    ValueError: on all processes, if not even one checkpoint has room.
  """
  if save_cfg is not None and not run_files.is_remote(model_dir):
    processes.in_the_first(lambda: _check(state, save_cfg, model_dir, total_steps))


def checkpoint_bytes(state: PyTree, save_cfg: checkpoints.SaveCheckpointConfig) -> int:
  """Size of one checkpoint, all processes' parts together, before compression."""

  def itemsize(x: jax.ShapeDtypeStruct) -> int:
    stored = save_cfg.dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jnp.dtype(stored).itemsize

  return sum(math.prod(x.shape) * itemsize(x) for x in jax.tree.leaves(state))


def _check(
  state: PyTree,
  save_cfg: checkpoints.SaveCheckpointConfig,
  model_dir: epath.PathLike,
  total_steps: int,
) -> None:
  saved, unfinished = checkpoint_reader.disk_use(model_dir)
  newest = max(saved, default=0)
  if newest >= total_steps:
    return
  # The size of this model's last checkpoint is a better guess than that of its arrays.
  one = saved.get(newest) or int(_COMPRESSED * checkpoint_bytes(state, save_cfg))
  free = shutil.disk_usage(model_dir).free + unfinished
  if free < one:
    raise ValueError(
      f'model_dir={model_dir} has {_text(free)} free, but a checkpoint takes {_text(one)}: make '
      "space, or bind SaveCheckpointConfig.dtype='bfloat16'."
    )
  count = math.ceil((total_steps - newest) / save_cfg.period)
  if save_cfg.keep is not None:  # the oldest goes when a new one is complete
    count = min(count, max(1, save_cfg.keep + 1 - len(saved)))
  if free < count * one:
    _log.warning(
      'model_dir=%s has %s free, which %d more checkpoints of %s do not fit into '
      '(SaveCheckpointConfig.keep=%s).',
      *(model_dir, _text(free), count, _text(one), save_cfg.keep),
    )


def cannot_write(error: OSError, model_dir: epath.PathLike) -> ValueError | None:
  """The sentence for a file of a run that cannot be written; None for any other error.

  On a full disk it says how much is free, and how much the newest checkpoint takes.
  """
  file = error.filename or model_dir
  if not str(file).startswith(str(model_dir)):
    return None
  text = f'{file} cannot be written: {error.strerror or error}'
  if error.errno in _FULL:
    text += f'; {_text(shutil.disk_usage(model_dir).free)} are free'
    if saved := checkpoint_reader.disk_use(model_dir)[0]:
      text += f', and a checkpoint takes {_text(saved[max(saved)])}'
    text += ': make space and start again'
  return ValueError(text)


def _text(num_bytes: int) -> str:
  for unit, size in (('GB', 1e9), ('MB', 1e6)):
    if num_bytes >= size:
      return f'{num_bytes / size:.1f} {unit}'
  return f'{num_bytes / 1e3:.1f} kB'
