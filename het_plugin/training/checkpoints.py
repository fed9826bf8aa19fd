"""Checkpoints of a run: train state, input position and a small record of the run, saved together.

The only module that knows orbax. A checkpoint of step n is the directory `checkpoint_n` of the run;
orbax writes it under another name and renames it when complete, so a crash leaves no half
checkpoint under its name. The record holds checksums of the arrays and of the JSON values, because
a damaged file need not make a reader fail: tensorstore has checksums of its tables, not of arrays.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from het_plugin import weights
from het_plugin.training import checksum, processes, rendezvous
from het_plugin.training.state import TrainState

_log = logging.getLogger(__name__)

PyTree = Any
_PREFIX = 'checkpoint'
# What `Checkpointer.save` adds to a record: the checksums of the arrays by name, and the digest of
# everything that is JSON. Checkpoints have both, or neither where they are older than these.
_CHECKSUMS, _DIGEST = 'checksums', 'digest'
_SECOND_HAND = 'another process failed'


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
    path: a run's directory, or a checkpoint in it, of ours or of t5x; or a published file.
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


class SaveFailed(SystemExit):  # noqa: N818 (it is an exit, not an error)
  """Raised on all processes when a checkpoint cannot be written; a main exits with code 1.

  The message is one sentence with the step, the reason and the newest complete checkpoint.
  """


class Unreadable(ValueError):  # noqa: N818 (it says what a checkpoint is)
  """A checkpoint cannot be read, or is not what was saved; raised on all processes."""


class _Manager(ocp.CheckpointManager):
  """orbax's, which asks the preemption service about numbers of steps at moments of its own.

  `PreemptionNotice` asks it about numbers of calls, and the service must see one count only.
  """

  def reached_preemption(self, step: int) -> bool:
    return False


class Checkpointer:
  """Saves to and resumes from one run's directory; all processes call its methods together."""

  def __init__(self, model_dir: epath.PathLike, save_cfg: SaveCheckpointConfig | None):
    """Opens the directory, which is created when missing."""
    self._save_cfg = save_cfg
    self._directory = epath.Path(model_dir).absolute()
    policy = ocp.checkpoint_managers.LatestN(None if save_cfg is None else save_cfg.keep)
    barrier = None
    if jax.process_count() > 1:
      client = ocp.multihost.get_jax_distributed_client()
      barrier = rendezvous.Rendezvous(client, jax.process_index())
    self._manager = _Manager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        step_prefix=_PREFIX,
        preservation_policy=policy,
        cleanup_tmp_directories=True,
        # One listing for all: on a file system with a cache they might differ.
        single_host_load_and_broadcast=True,
        async_options=ocp.options.AsyncOptions(barrier_sync_fn=barrier),
      ),
      item_handlers={
        'state': ocp.StandardCheckpointHandler(),
        'dataset': ocp.JsonCheckpointHandler(),
        'record': ocp.JsonCheckpointHandler(),
      },
    )
    self._watcher = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint')
    self._saving: concurrent.futures.Future | None = None  # until what is being saved is on disk
    self._saving_step = 0

  def save(
    self,
    step: int,
    train_state: TrainState,
    dataset_state: Mapping[str, int],
    record: Mapping[str, Any],
    flush: Callable[[], None] | None = None,
  ) -> None:
    """Saves in the background, unless this step is saved already or nothing is to be saved.

    Returns once the state is copied off the device, so its buffers may be donated.

    Args:
      step: the number that train_state.step holds.
      train_state: arrays.
      dataset_state: of the input iterator after this step's batch.
      record: a few JSON values about the run.
      flush: writes what must be on disk before the checkpoint is; called first.

    Raises:
      SaveFailed: this checkpoint, what `flush` writes or the checkpoint before cannot be written.
    """
    if self._save_cfg is None:
      return
    self.wait_until_finished()
    if flush is not None:
      self._check(step, _attempt(flush)[1])
    if step in self._manager.all_steps():
      return
    arrays = _arrays(train_state)
    if self._save_cfg.dtype != 'float32':
      arrays = jax.tree.map(lambda x: _cast(x, self._save_cfg.dtype), arrays)
    items = {'state': ocp.args.StandardSave(arrays)}
    if self._save_cfg.save_dataset:
      items['dataset'] = ocp.args.JsonSave(dict(dataset_state))
    record = {**record, _CHECKSUMS: checksum.array_checksums(_named(arrays))}
    record[_DIGEST] = _digest(record, dict(dataset_state) if 'dataset' in items else None)
    items['record'] = ocp.args.JsonSave(record)
    _, failure = _attempt(
      functools.partial(self._manager.save, step, args=ocp.args.Composite(**items), force=True)
    )
    self._saving_step = step
    self._saving = self._watcher.submit(self._wait, failure)

  def _wait(self, failure: Exception | None) -> None:
    if failure is not None:
      raise failure
    self._manager.wait_until_finished()

  @property
  def failed(self) -> bool:
    """Whether the last save has failed on this process: `wait_until_finished` will say so on all.

    Costs nothing: it may be asked after every step.
    """
    saving = self._saving
    return saving is not None and saving.done() and saving.exception() is not None

  def wait_until_finished(self) -> None:
    """Blocks until the last save is on disk.

    Raises:
      SaveFailed: on all processes, if it failed on one.
    """
    if self._saving is not None:
      saving, self._saving = self._saving, None
      self._check(self._saving_step, saving.exception())

  def _check(self, step: int, failure: BaseException | None) -> None:
    """Raises SaveFailed on all processes if one has a failure."""
    reasons = processes.gather('' if failure is None else _one_line(failure))
    if not reasons:
      return
    complete = _steps(self._directory)
    newest = (
      f'the newest complete one is {self._step_dir(max(complete))}, from which the same command '
      'goes on'
      if complete
      else 'the run has no complete one, so the same command starts it again'
    )
    raise SaveFailed(
      f'Error: the checkpoint of step {step} cannot be written ({_reason(reasons)}); {newest}.'
    ) from failure

  def restore(self, target: TrainState) -> Restored | None:
    """Reads the newest checkpoint that is whole, or returns None where the run has none.

    One that cannot be read or is not what was saved is reported and passed over for the one before
    it; once that is read, it is set aside under the name `unreadable_checkpoint_n`.

    Args:
      target: shapes with shardings. The mesh may differ from the one that saved.

    Raises:
      ValueError: parameters of the checkpoint do not match the target's.
      RuntimeError: the run has checkpoints, but none is whole.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for i, step in enumerate(steps):
      path = self._step_dir(step)
      try:
        restored = _restore(path, target)
      except Unreadable as reason:
        _log.error('Passing over %s, which cannot be read: %s', path, reason)
        continue
      _log.info('Resuming from %s.', path)
      self._set_aside(steps[:i])
      return restored
    if steps:
      raise RuntimeError(f'None of the checkpoints in {self._directory} can be read; see the log.')
    return None

  def _step_dir(self, step: int) -> epath.Path:
    return self._directory / f'{_PREFIX}_{step}'

  def _set_aside(self, steps: Sequence[int]) -> None:
    # Out of the way of the checkpoints that this run will save at the same steps, but not lost.
    if not steps:
      return

    def rename() -> None:
      for step in steps:
        name = f'unreadable_{_PREFIX}_{step}'
        names = itertools.chain([name], (f'{name}.{i}' for i in itertools.count(2)))
        free = next(x for x in names if not (self._directory / x).exists())
        self._step_dir(step).rename(self._directory / free)

    _on_all(rename if jax.process_index() == 0 else lambda: None)
    self._manager.reload()

  def close(self) -> None:
    """Waits for the last save and ends the background threads; a failure goes to the log."""
    _, failure = _attempt(self._manager.close)
    self._watcher.shutdown()
    if failure is not None and self._saving is not None:  # nobody has been told
      _log.error('The checkpoint of step %d is not written: %s', self._saving_step, failure)


def _restore(path: epath.Path, target: TrainState) -> Restored:
  """Reads a checkpoint of this run.

  Raises:
    Unreadable: it is not whole.
    ValueError: it is of another model.
  """
  description, saved = _on_all(functools.partial(_describe, path))
  if description is None:
    raise Unreadable('it has no record.')
  _check_match_on_all(_named(_arrays(target)), saved, path)
  wanted = jax.tree_util.tree_map_with_path(
    lambda name, x: _like(x, saved[_name(name)].dtype), _arrays(target)
  )
  # The handlers' own `restore`: a checkpointer's has a barrier, at which the others would wait for
  # a process that cannot read.
  handler = ocp.StandardCheckpointHandler()
  read = _on_all(lambda: handler.restore(path / 'state', args=ocp.args.StandardRestore(wanted)))
  _verify(_named(read), description.checksums, path)
  read = jax.tree.map(lambda x, like: _cast(x, like.dtype), read, _arrays(target))
  return Restored(target.replace(**read), description.dataset_state, description.record)


def newest_record(model_dir: epath.PathLike) -> tuple[int, dict[str, Any]] | None:
  """Step and record of the newest checkpoint whose record is whole; None: there is none.

  Reads only, and for itself: one process may call it alone.
  """
  directory = epath.Path(model_dir).absolute()
  steps = _steps(directory)
  for step in sorted(steps, reverse=True):
    read, _ = _attempt(functools.partial(_read_json, directory / f'{_PREFIX}_{step}'))
    if read is not None:
      return step, read.record
  return None


def _steps(directory: epath.Path) -> list[int]:
  """Of the complete checkpoints of a run; orbax also counts those that were set aside."""
  if not directory.exists():
    return []
  steps = ocp.utils.checkpoint_steps(directory)
  return [step for step in steps if (directory / f'{_PREFIX}_{step}').exists()]


def restore_params(cfg: RestoreCheckpointConfig, target: PyTree) -> dict[str, jax.Array]:
  """Reads parameters for a warm start.

  Args:
    cfg: where from and which.
    target: the model's parameters as shapes with shardings.

  Returns:
    {'head/kernel': array, ...} on the target's shardings; those left to be initialised are absent.

  Raises:
    ValueError: no checkpoint at the path, its parameters do not match the target's, or it is
      damaged.
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
  read = _read_params(path, wanted)
  _log.info('Initial parameters from %s: %d of %d.', path, len(source), len(flat))
  return {name: read[found] for name, found in source.items()}


def _read_params(
  path: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Parameters by name, from one checkpoint to where the shapes say.

  Raises:
    Unreadable: the checkpoint is damaged.
  """
  try:
    description, saved = _on_all(functools.partial(_describe, path))
    root = _params_root(saved)
    stored = {name: _like(x, saved[f'{root}/{name}'].dtype) for name, x in wanted.items()}
    item = {root: traverse_util.unflatten_dict(stored, sep='/')}
    args = ocp.args.PyTreeRestore(
      item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    handler = ocp.PyTreeCheckpointHandler()
    read = _on_all(lambda: handler.restore(path / 'state', args=args))
    _verify(_named(read), None if description is None else description.checksums, path)
  except Unreadable as reason:
    raise Unreadable(f'{path} cannot be read: {reason}') from reason
  read = traverse_util.flatten_dict(read[root], sep='/')
  return {name: _cast(x, wanted[name].dtype) for name, x in read.items()}


@dataclasses.dataclass(frozen=True)
class _Description:
  """What is JSON in a checkpoint.

  Attributes:
    record: what `Checkpointer.save` was given.
    dataset_state: None when it was not saved.
    checksums: of the arrays by name; None in a checkpoint older than these.
  """

  record: dict[str, Any]
  dataset_state: dict[str, int] | None
  checksums: dict[str, int] | None


def _describe(path: epath.Path) -> tuple[_Description | None, dict[str, Any]]:
  """A checkpoint's JSON, None where it has no record, and its arrays' metadata by name.

  Raises:
    Exception: it is damaged.
  """
  saved = _named(ocp.StandardCheckpointHandler().metadata(path / 'state').tree)
  description = _read_json(path)
  checksums = None if description is None else description.checksums
  if checksums is not None and set(checksums) != set(saved):
    raise ValueError('its arrays are not those that were saved')
  return description, saved


def _read_json(path: epath.Path) -> _Description | None:
  """What is JSON in a checkpoint; None where it has no record.

  Raises:
    Exception: it is damaged.
  """
  if not (path / 'record').exists():
    return None
  handler = ocp.JsonCheckpointHandler()
  record = handler.restore(path / 'record')
  dataset_state = handler.restore(path / 'dataset') if (path / 'dataset').exists() else None
  digest = record.pop(_DIGEST, None)
  if (_CHECKSUMS in record) != (digest is not None):
    raise ValueError('its record is not what was saved')
  if digest is not None and digest != _digest(record, dataset_state):
    raise ValueError('its record or its input position is not what was saved')
  return _Description(record, dataset_state, record.pop(_CHECKSUMS, None))


def _digest(record: Mapping[str, Any], dataset_state: Mapping[str, int] | None) -> str:
  return checksum.json_digest([record, dataset_state])


def _verify(
  arrays: Mapping[str, jax.Array], checksums: Mapping[str, int] | None, path: epath.Path
) -> None:
  """Raises Unreadable on all processes if arrays are not what was saved on one."""
  if checksums is None:
    _log.warning('%s has no checksums: damage of its arrays may go unnoticed.', path)
    return
  found = checksum.array_checksums(arrays)
  damaged = [name for name, value in found.items() if value != checksums[name]]
  others = f' ({len(damaged)} such arrays)' if len(damaged) > 1 else ''
  if reasons := processes.gather(f'{damaged[0]} is not what was saved{others}.' if damaged else ''):
    raise Unreadable(_reason(reasons))


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


def disk_use(model_dir: epath.PathLike) -> tuple[dict[int, int], int]:
  """({step: bytes} of a local run's checkpoints, bytes of unfinished ones).

  Opening a `Checkpointer` deletes the unfinished ones.
  """
  root = Path(model_dir).absolute()
  if not root.exists():
    return {}, 0
  complete = {step: _size(root / f'{_PREFIX}_{step}') for step in _steps(root)}
  return complete, sum(_size(path) for path in root.glob(f'{_PREFIX}_*.orbax-checkpoint-tmp*'))


def _size(folder: Path) -> int:
  return sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())


def params_shapes(checkpoint: epath.PathLike) -> dict[str, tuple[int, ...]]:
  """{'head/kernel': shape, ...} of a checkpoint's parameters; reads no array."""
  saved = _named(ocp.StandardCheckpointHandler().metadata(epath.Path(checkpoint) / 'state').tree)
  prefix = f'{_params_root(saved)}/'
  return {
    name.removeprefix(prefix): tuple(x.shape)
    for name, x in saved.items()
    if name.startswith(prefix)
  }


def _params_root(saved: Collection[str]) -> str:
  """What the names of a checkpoint's parameters begin with; t5x's are its optimizer's target."""
  return 'target' if any(name.startswith('target/') for name in saved) else 'params'


def read_params(path: str) -> dict[str, np.ndarray]:
  """{'head/kernel': array, ...} of the checkpoint that `find` finds at `path`, on the host.

  Raises:
    ValueError: there is no checkpoint, or it is damaged.
  """
  folder = find(path)
  device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend='cpu')[0])
  wanted = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device)
    for name, shape in params_shapes(folder).items()
  }
  return {name: np.asarray(x) for name, x in _read_params(folder, wanted).items()}


def read_arrays(path: epath.PathLike) -> dict[str, np.ndarray]:
  """{'params/head/kernel': array, 'opt_state/...': array, 'step': array} of the checkpoint that
  `find` finds at `path`, as it was saved, on the host.

  Raises:
    ValueError: there is no checkpoint.
  """
  folder = find(path) / 'state'
  tree = ocp.StandardCheckpointHandler().metadata(folder).tree
  on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    read = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=on_host))
  return {
    jax.tree_util.keystr(key, simple=True, separator='/'): np.asarray(x)
    for key, x in jax.tree_util.tree_leaves_with_path(read)
  }


_TO_T5X = {'params/': 'target/', 'opt_state/': 'state/param_states/', 'step': 'state/step'}


def write_t5x(path: epath.PathLike, model_dir: epath.PathLike) -> str:
  """Writes the checkpoint that `find` finds at `path` as t5x's trainer would have saved it.

  It has the optimizer's state and, as gin/t5x/train.gin reads it in one process, the input
  position: t5x can go on with the run.

  Args:
    path: a run of ours, or a checkpoint in it.
    model_dir: of the run under t5x.

  Returns:
    Where it is, MODEL_DIR/checkpoint_STEP.

  Raises:
    ValueError: there is no checkpoint, it is t5x's already, or model_dir has one of this step.
  """
  folder = find(path)
  arrays = read_arrays(folder)
  if _params_root(arrays) != 'params':
    raise ValueError(f'{folder} is a checkpoint of t5x already')
  target = epath.Path(model_dir).absolute() / folder.name
  if target.exists():
    raise ValueError(f'{target} exists already')
  renamed = {}
  for name, x in arrays.items():
    old = next(prefix for prefix in _TO_T5X if name.startswith(prefix))
    renamed[_TO_T5X[old] + name.removeprefix(old)] = x
  tree = traverse_util.unflatten_dict(renamed, sep='/')
  options = ocp.CheckpointManagerOptions(step_prefix=_PREFIX)
  with ocp.CheckpointManager(target.parent, options=options) as manager:
    manager.save(step_of(folder), args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
  if (state := read_dataset_state(folder)) is not None:
    (target / 'dataset').mkdir()
    (target / 'dataset' / 'train_ds-000-of-001').write_text(json.dumps(state))
  return str(target)


def read_dataset_state(path: epath.PathLike) -> dict[str, int] | None:
  """The input position in the checkpoint that `find` finds at `path`; None if it has none.

  Raises:
    ValueError: there is no checkpoint.
  """
  folder = find(path) / 'dataset'
  if not folder.exists():
    return None
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
    return checkpointer.restore(folder, args=ocp.args.JsonRestore())


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
  steps = _steps(path)
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


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
  """Floating point arrays in another type; others unchanged."""
  return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _like(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)


def _name(path: jax.tree_util.KeyPath) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _named(tree: PyTree) -> dict[str, Any]:
  """Arrays, shapes or metadata of arrays, by name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, 'shape'))
  return {_name(path): leaf for path, leaf in leaves}


def _check_match_on_all(
  wanted: Mapping[str, Any], saved: Mapping[str, Any], path: os.PathLike
) -> None:
  """`_check_match` of arrays' shapes; raises on all processes if it does on one."""
  shapes = ({name: tuple(x.shape) for name, x in side.items()} for side in (wanted, saved))
  _, mismatch = _attempt(functools.partial(_check_match, *shapes, path))
  if reasons := processes.gather('' if mismatch is None else str(mismatch)):
    raise ValueError(next(iter(reasons.values())))


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
  """(result, None) or (None, whatever a damaged file or a full disk made it raise)."""
  try:
    return read(), None
  except Exception as error:
    return None, error


def _on_all(read: Callable[[], Any]) -> Any:
  """What `read` returns, which all processes call at the same time.

  Raises:
    Unreadable: on all of them, if it raises on one.
  """
  result, failure = _attempt(read)
  if reasons := processes.gather('' if failure is None else _one_line(failure)):
    raise Unreadable(_reason(reasons)) from failure
  return result


def _reason(reasons: Mapping[int, str]) -> str:
  """Gathered reasons in one line, without those of processes that only waited for another."""
  first_hand = {i: reason for i, reason in reasons.items() if reason != _SECOND_HAND}
  return processes.as_one(first_hand or reasons)


def _one_line(error: BaseException) -> str:
  """The reason in an error, or in what was raised before it where that has the reason."""
  while isinstance(error, rendezvous.PeerFailed):
    if error.__context__ is None:
      return _SECOND_HAND
    error = error.__context__
  text = ' '.join(str(error).split())
  if code := re.search(r"os_error_code='(\d+)'", text):  # tensorstore's, with a page around it
    return os.strerror(int(code[1]))
  text = text.partition(' [source locations=')[0]
  return f'{type(error).__name__}: {text}' if text else type(error).__name__
