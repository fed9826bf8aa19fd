"""Checkpoints of a run: train state, input position and a small record of the run, saved together.

The only module that knows orbax. A checkpoint of step n is the directory `checkpoint_n` of the run;
orbax writes it under another name and renames it when complete, so a crash leaves no half
checkpoint under its name.
"""

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util
from jax.experimental import multihost_utils

from het_plugin import weights
from het_plugin.training.train_state import TrainState

_log = logging.getLogger(__name__)

PyTree = Any
_PREFIX = 'checkpoint'


@dataclasses.dataclass(frozen=True)
class SaveCheckpointConfig:
  """What a run saves.

  Attributes:
    period: steps between checkpoints; the last step is saved in any case.
    keep: number of newest checkpoints to keep; None for all.
    dtype: 'float32', or 'bfloat16' to store floating-point arrays in half the space; a run resumed
      from these continues from rounded parameters.
    save_dataset: False leaves the input position out: a resumed run starts again with the first
      example.
  """

  period: int
  keep: int | None = None
  dtype: str = 'float32'
  save_dataset: bool = True

  def __post_init__(self):
    if self.period < 1:
      raise ValueError(f'SaveCheckpointConfig.period={self.period} must be at least 1.')
    if self.keep is not None and self.keep < 1:
      raise ValueError(
        f'SaveCheckpointConfig.keep={self.keep} must be at least 1, or None for all.'
      )
    if self.dtype not in ('float32', 'bfloat16'):
      raise ValueError(
        f"SaveCheckpointConfig.dtype={self.dtype!r} must be 'float32' or 'bfloat16'."
      )


@dataclasses.dataclass(frozen=True)
class RestoreCheckpointConfig:
  """Another run's checkpoint to take the initial parameters from; optimizer and step start afresh.

  Attributes:
    path: a run's directory, or a checkpoint in it; or a published file.
    mode: 'latest' takes the newest checkpoint of the run at `path`, 'specific' the checkpoint at
      `path`.
    assignment_map: (pattern, replacement) pairs. A parameter of the model ('head/kernel') that a
      pattern matches as a whole is read from the replacement (re.sub syntax), or not at all when
      that is None.
    fallback_to_scratch: True initialises parameters that the checkpoint does not have, and passes
      over those that the model does not have (DET to HET-XL); False makes either an error.
    head: for a published file (`path` ends in .npz or .safetensors, see `weights`): 'keep' takes
      its head, whose classes are then the model's; 'init' initialises the model's.
    skip: for a published file: regular expressions of names in it to pass over.
  """

  path: str
  mode: str = 'latest'
  assignment_map: Sequence[tuple[str, str | None]] = ()
  fallback_to_scratch: bool = False
  head: str = 'keep'
  skip: Sequence[str] = ()

  def __post_init__(self):
    if self.head not in weights.HEADS:
      raise ValueError(
        f'RestoreCheckpointConfig.head={self.head!r} is unknown: choose one of '
        f'{", ".join(weights.HEADS)}.'
      )
    if self.mode not in ('latest', 'specific'):
      raise ValueError(
        f"RestoreCheckpointConfig.mode={self.mode!r} must be 'latest' or 'specific'."
      )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Attributes: save, None to save nothing; restore, None to initialise from scratch."""

  save: SaveCheckpointConfig | None = None
  restore: RestoreCheckpointConfig | None = None


@dataclasses.dataclass(frozen=True)
class Restored:
  """A checkpoint read back.

  Attributes:
    train_state: on the target's shardings.
    dataset_state: of the input iterator; None when it was not saved.
    record: what `Checkpointer.save` was given.
  """

  train_state: TrainState
  dataset_state: dict[str, int] | None
  record: dict[str, Any]


class Checkpointer:
  """Saves to and resumes from one run's directory."""

  def __init__(self, model_dir: epath.PathLike, save_cfg: SaveCheckpointConfig | None):
    """Opens the directory, which is created when missing."""
    self._save_cfg = save_cfg
    self._directory = epath.Path(model_dir).absolute()
    policy = ocp.checkpoint_managers.LatestN(None if save_cfg is None else save_cfg.keep)
    self._manager = ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        step_prefix=_PREFIX, preservation_policy=policy, cleanup_tmp_directories=True
      ),
      item_handlers={
        'state': ocp.StandardCheckpointHandler(),
        'dataset': ocp.JsonCheckpointHandler(),
        'record': ocp.JsonCheckpointHandler(),
      },
    )

  def save(
    self,
    step: int,
    train_state: TrainState,
    dataset_state: Mapping[str, int],
    record: Mapping[str, Any],
  ) -> None:
    """Saves in the background, unless this step is saved already or nothing is to be saved.

    Returns once the state is copied off the device, so its buffers may be donated; all processes
    call it.

    Args:
      step: the number that train_state.step holds.
      train_state: arrays.
      dataset_state: of the input iterator after this step's batch.
      record: a few JSON values about the run.
    """
    if self._save_cfg is None or step in self._manager.all_steps():
      return
    arrays = _arrays(train_state)
    if self._save_cfg.dtype != 'float32':
      arrays = jax.tree.map(lambda x: _cast(x, self._save_cfg.dtype), arrays)
    items = {'state': ocp.args.StandardSave(arrays), 'record': ocp.args.JsonSave(dict(record))}
    if self._save_cfg.save_dataset:
      items['dataset'] = ocp.args.JsonSave(dict(dataset_state))
    self._manager.save(step, args=ocp.args.Composite(**items), force=True)

  def restore(self, target: TrainState) -> Restored | None:
    """Reads the newest checkpoint that can be read, or returns None where the run has none.

    One that cannot be read is reported and passed over for the one before it; once that is read,
    it is set aside under the name `unreadable_checkpoint_n`.

    Args:
      target: shapes with shardings. The mesh may differ from the one that saved.

    Raises:
      ValueError: parameters of the checkpoint do not match the target's.
      RuntimeError: the run has checkpoints, but none can be read.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for i, step in enumerate(steps):
      saved, failure = _attempt(functools.partial(self._saved_shapes, step))
      if failure is None:
        _check_match(_shapes(_arrays(target)), saved, self._step_dir(step))
        restored, failure = _attempt(functools.partial(self._read, step, target))
      if _all_processes(failure is None):
        _log.info('Resuming from %s.', self._step_dir(step))
        self._set_aside(steps[:i])
        return restored
      _log.error('Passing over %s, which cannot be read: %s', self._step_dir(step), failure)
    if steps:
      raise RuntimeError(f'None of the checkpoints in {self._directory} can be read; see the log.')
    return None

  def _step_dir(self, step: int) -> epath.Path:
    return self._directory / f'{_PREFIX}_{step}'

  def _saved_shapes(self, step: int) -> dict[str, tuple[int, ...]]:
    return _shapes(self._manager.item_metadata(step)['state'].tree)

  def _read(self, step: int, target: TrainState) -> Restored:
    items = {
      'state': ocp.args.StandardRestore(_arrays(target)),
      'record': ocp.args.JsonRestore(),
    }
    if (self._step_dir(step) / 'dataset').exists():
      items['dataset'] = ocp.args.JsonRestore()
    read = self._manager.restore(step, args=ocp.args.Composite(**items))
    return Restored(
      train_state=target.replace(**read['state']),
      dataset_state=read.get('dataset'),
      record=read['record'],
    )

  def _set_aside(self, steps: Sequence[int]) -> None:
    # Out of the way of the checkpoints that this run will save at the same steps, but not lost.
    if steps and jax.process_index() == 0:
      for step in steps:
        self._step_dir(step).rename(self._directory / f'unreadable_{_PREFIX}_{step}')
    multihost_utils.sync_global_devices('set unreadable checkpoints aside')
    self._manager.reload()

  def wait_until_finished(self) -> None:
    """Blocks until the last save is on disk; raises if it failed."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for the last save and ends the background threads."""
    self._manager.close()


def restore_params(cfg: RestoreCheckpointConfig, target: PyTree) -> dict[str, jax.Array]:
  """Reads parameters for a warm start.

  Args:
    cfg: where from and which.
    target: the model's parameters as shapes with shardings.

  Returns:
    {'head/kernel': array, ...} on the target's shardings; those left to be initialised are absent.

  Raises:
    ValueError: no checkpoint at the path, or its parameters do not match the target's.
  """
  if weights.is_weights_file(cfg.path):
    return _read_published(cfg, target)
  path = _checkpoint_dir(cfg)
  saved = params_shapes(path)
  flat = traverse_util.flatten_dict(target, sep='/')
  source = {name: _source_name(name, cfg.assignment_map) for name in flat}
  if cfg.fallback_to_scratch:
    source = {name: found for name, found in source.items() if found in saved}
    _log.info('From scratch: %s.', ', '.join(sorted(set(flat) - set(source))) or 'nothing')
    _log.info('Not used: %s.', ', '.join(sorted(set(saved) - set(source.values()))) or 'nothing')
    saved = {found: saved[found] for found in source.values()}
  _check_match({found: flat[name].shape for name, found in source.items()}, saved, path)

  wanted = {found: flat[name] for name, found in source.items()}
  read = _read(path, wanted)
  _log.info('Initial parameters from %s: %d of %d.', path, len(source), len(flat))
  return {name: read[found] for name, found in source.items()}


def _read(path: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
  """Parameters by name, from one checkpoint to where the shapes say."""
  item = {'params': traverse_util.unflatten_dict(wanted, sep='/')}
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    read = checkpointer.restore(
      path / 'state',
      args=ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
      ),
    )
  return traverse_util.flatten_dict(read['params'], sep='/')


def find(path: epath.PathLike) -> epath.Path:
  """The checkpoint at `path`, which may be a run's directory: then its newest.

  Raises:
    ValueError: there is none.
  """
  specific = (epath.Path(path).absolute() / 'state').exists()
  return _checkpoint_dir(
    RestoreCheckpointConfig(str(path), mode='specific' if specific else 'latest')
  )


def step_of(checkpoint: epath.PathLike) -> int:
  """The step that a checkpoint's directory is named by."""
  return int(epath.Path(checkpoint).name.removeprefix(f'{_PREFIX}_'))


def params_shapes(checkpoint: epath.PathLike) -> dict[str, tuple[int, ...]]:
  """{'head/kernel': shape, ...} of a checkpoint's parameters; reads no array."""
  tree = ocp.StandardCheckpointHandler().metadata(epath.Path(checkpoint) / 'state').tree
  return {
    name.removeprefix('params/'): shape
    for name, shape in _shapes(tree).items()
    if name.startswith('params/')
  }


def read_params(path: str) -> dict[str, np.ndarray]:
  """{'head/kernel': array, ...} of the checkpoint that `find` finds at `path`, on the host.

  Raises:
    ValueError: there is no checkpoint.
  """
  folder = find(path)
  device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend='cpu')[0])
  wanted = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device)
    for name, shape in params_shapes(folder).items()
  }
  return {name: np.asarray(x) for name, x in _read(folder, wanted).items()}


def _read_published(cfg: RestoreCheckpointConfig, target: PyTree) -> dict[str, jax.Array]:
  flat = traverse_util.flatten_dict(target, sep='/')
  try:
    read, report = weights.load_params(
      weights.read_arrays(cfg.path), {name: x.shape for name, x in flat.items()}, cfg.head, cfg.skip
    )
  except ValueError as error:
    raise ValueError(f'RestoreCheckpointConfig.path={cfg.path}: {error}') from error
  _log.info('Initial parameters from %s: %s', cfg.path, report.text())
  return place(read, flat)


def place(
  arrays: Mapping[str, np.ndarray], target: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Host arrays by name, on the shardings of their targets."""
  return {
    name: jax.make_array_from_callback(x.shape, target[name].sharding, x.__getitem__)
    for name, x in arrays.items()
  }


def _checkpoint_dir(cfg: RestoreCheckpointConfig) -> epath.Path:
  path = epath.Path(cfg.path).absolute()
  if cfg.mode == 'specific':
    if not (path / 'state').exists():
      raise ValueError(
        f"RestoreCheckpointConfig.path={cfg.path} is no checkpoint (mode='specific')."
      )
    return path
  steps = ocp.utils.checkpoint_steps(path) if path.exists() else []
  if not steps:
    raise ValueError(
      f"RestoreCheckpointConfig.path={cfg.path} holds no checkpoint (mode='latest')."
    )
  return path / f'{_PREFIX}_{max(steps)}'


def _source_name(name: str, assignment_map: Sequence[tuple[str, str | None]]) -> str | None:
  for pattern, replacement in assignment_map:
    if re.fullmatch(pattern, name):
      return None if replacement is None else re.sub(f'^(?:{pattern})$', replacement, name)
  return name


def _arrays(train_state: TrainState) -> dict[str, PyTree]:
  return {
    'step': train_state.step,
    'params': train_state.params,
    'opt_state': train_state.opt_state,
  }


def _cast(x: jax.Array, dtype: str) -> jax.Array:
  return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, 'shape'))
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): tuple(leaf.shape)
    for path, leaf in leaves
  }


def _check_match(
  wanted: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], path: os.PathLike
) -> None:
  # Parameters first: optimizer state differs wherever they do, under less telling names.
  for name, shape in sorted(wanted.items(), key=lambda item: not item[0].startswith('params/')):
    if name not in saved:
      raise ValueError(f'{path} has no {name}, which this run has with shape {shape}.')
    if saved[name] != shape:
      raise ValueError(f'{path} holds {name} with shape {saved[name]}, but this run has {shape}.')
  if extra := sorted(set(saved) - set(wanted)):
    raise ValueError(f'{path} holds {extra[0]}, which this run does not have ({len(extra)} such).')


def _attempt(read: Callable[[], Any]) -> tuple[Any, Exception | None]:
  """(result, None) or (None, whatever a damaged file made the reader raise)."""
  try:
    return read(), None
  except Exception as error:
    return None, error


def _all_processes(ok: bool) -> bool:
  return ok if jax.process_count() == 1 else bool(np.all(multihost_utils.process_allgather(ok)))
