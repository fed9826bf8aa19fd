"""Checks that disk and host memory have room for checkpoints, before anything is compiled."""

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from het_plugin.training import checkpoint_reader, checkpoints, processes, run_files

_log = logging.getLogger(__name__)

PyTree = Any
_COMPRESSED = 0.9  # zstd takes 7% off float32 weights
_TIGHT = 0.8  # of the available memory
_CGROUP = Path('/sys/fs/cgroup')


def check(
  state: PyTree,
  save_cfg: checkpoints.SaveCheckpointConfig | None,
  model_dir: epath.PathLike,
  total_steps: int,
) -> None:
  """Warns where a run's checkpoints are likely to run out of room; all processes call it.

  Args:
    state: the train state as shapes with shardings.
    save_cfg: None for a run that saves nothing.
    model_dir: its directory.
    total_steps: of the run.

  Raises:
    ValueError: on all processes, if not even one checkpoint has room on one.
  """
  if save_cfg is None:
    return
  problems = [
    _check_disk(state, save_cfg, model_dir, total_steps),
    _check_memory(state, save_cfg),
  ]
  if texts := processes.gather(' '.join(filter(None, problems))):
    raise ValueError(processes.as_one(texts))


def checkpoint_bytes(state: PyTree, save_cfg: checkpoints.SaveCheckpointConfig) -> int:
  """Size of one checkpoint, all processes' parts together, before compression."""
  return sum(math.prod(x.shape) * _itemsize(x, save_cfg) for x in jax.tree.leaves(state))


def host_bytes(state: PyTree, save_cfg: checkpoints.SaveCheckpointConfig) -> int:
  """Bytes that this process copies off its devices to write its part, at most."""
  return sum(
    _num_addressable(x.shape, x.sharding) * _itemsize(x, save_cfg) for x in jax.tree.leaves(state)
  )


def _itemsize(x: jax.ShapeDtypeStruct, save_cfg: checkpoints.SaveCheckpointConfig) -> int:
  stored = save_cfg.dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
  return jnp.dtype(stored).itemsize


def _num_addressable(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> int:
  """Elements of an array that lie on this process's devices, each counted once."""
  places = sharding.addressable_devices_indices_map(shape).values()
  ranges = {
    tuple(s.indices(size)[:2] for s, size in zip(place, shape, strict=True)) for place in places
  }
  return sum(math.prod(stop - start for start, stop in place) for place in ranges)


def _check_disk(
  state: PyTree,
  save_cfg: checkpoints.SaveCheckpointConfig,
  model_dir: epath.PathLike,
  total_steps: int,
) -> str:
  """What is wrong, if anything, in a sentence."""
  if run_files.is_remote(model_dir) or jax.process_index() != 0:
    return ''
  saved, unfinished = checkpoint_reader.disk_use(model_dir)
  newest = max(saved, default=0)
  if newest >= total_steps:
    return ''
  # The size of this model's last checkpoint is a better guess than that of its arrays.
  one = saved.get(newest) or int(_COMPRESSED * checkpoint_bytes(state, save_cfg))
  free = shutil.disk_usage(model_dir).free + unfinished
  if free < one:
    return (
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
  return ''


def _check_memory(state: PyTree, save_cfg: checkpoints.SaveCheckpointConfig) -> str:
  """What is wrong, if anything, in a sentence."""
  need, available = host_bytes(state, save_cfg), available_host_bytes()
  if available is not None and available < need:
    return (
      f'A checkpoint needs {_text(need)} of host memory while it is written, but '
      f"{_text(available)} are available: bind SaveCheckpointConfig.dtype='bfloat16' or take more "
      'processes.'
    )
  if available is not None and _TIGHT * available < need:
    _log.warning(
      'A checkpoint needs %s of host memory while it is written; %s are available.',
      *(_text(need), _text(available)),
    )
  return ''


def available_host_bytes() -> int | None:
  """What this process may still allocate: by the machine and by its container; None if unknown."""
  return min((x for x in (_meminfo(), _cgroup()) if x is not None), default=None)


def _meminfo() -> int | None:
  rows = dict(line.split(':', 1) for line in _lines(Path('/proc/meminfo')))
  return 1024 * int(rows['MemAvailable'].split()[0]) if 'MemAvailable' in rows else None


def _cgroup() -> int | None:
  """What the container (cgroup v2) still allows."""
  limit, usage = _lines(_CGROUP / 'memory.max'), _lines(_CGROUP / 'memory.current')
  if not limit or not usage or not limit[0].isdecimal():  # 'max'
    return None
  stat = dict(line.split() for line in _lines(_CGROUP / 'memory.stat'))
  return max(0, int(limit[0]) - int(usage[0]) + int(stat.get('inactive_file', 0)))


def _lines(path: Path) -> list[str]:
  return path.read_text().splitlines() if path.is_file() else []


def _text(num_bytes: int) -> str:
  for unit, size in (('GB', 1e9), ('MB', 1e6)):
    if num_bytes >= size:
      return f'{num_bytes / size:.1f} {unit}'
  return f'{num_bytes / 1e3:.1f} kB'
