"""Reads one checkpoint: its parameters, input position and record, on any mesh.

A checkpoint of step n is the directory `checkpoint_n` of a run, written by the built-in trainer or
by t5x, which name the parts differently. The built-in trainer adds a record of the run with the
checksums of all arrays and a digest of all JSON, because tensorstore does not notice every damaged
byte.

Functions that read arrays are collective: all processes call them at the same time, and if one
process cannot read, all of them raise.
"""

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from het_plugin.system import checksum, processes

_log = logging.getLogger(__name__)

PyTree = Any
PREFIX = 'checkpoint'
_EMA = '/ema_params/'  # the field of `optimizers.EmaState`
# Entries that `seal` adds to a record.
_STEP = 'step'
_CHECKSUMS = 'checksums'
_DIGEST = 'digest'
_NAME = rf'{PREFIX}_\d+'
_COMMIT = 'commit_success.txt'


class Unreadable(ValueError):  # noqa: N818 (it describes a checkpoint)
  """A checkpoint cannot be read, or differs from what was saved; raised on all processes."""

  def __init__(self, checkpoint: epath.PathLike, reason: str):
    super().__init__(f'{checkpoint} cannot be read: {reason}')
    self.reason = reason


@dataclasses.dataclass(frozen=True)
class Description:
  """The JSON parts of a checkpoint of the built-in trainer."""

  record: dict[str, Any]  # of `Checkpointer.save`
  dataset_state: dict[str, int] | None  # the input position; None if it was not saved
  checksums: dict[str, int]  # by name of the array


def steps(model_dir: epath.PathLike) -> list[int]:
  """Steps of the complete checkpoints of a run."""
  directory = epath.Path(model_dir).absolute()
  if not directory.exists():
    return []
  # orbax also counts checkpoints that were set aside under another prefix.
  found = ocp.utils.checkpoint_steps(directory)
  committed = [step for step in found if (directory / f'{PREFIX}_{step}').exists()]
  return committed + [
    step for step in _uncommitted(directory, committed) if _is_whole(directory, step)
  ]


def commit(model_dir: epath.PathLike) -> None:
  """Lets orbax know of complete checkpoints that it takes for unfinished; for one process.

  In an object store it asks for a file that ends a save. Other versions, and other tools that copy
  a checkpoint there, do not write it.
  """
  directory = epath.Path(model_dir).absolute()
  committed = ocp.utils.checkpoint_steps(directory) if directory.exists() else []
  for step in set(steps(directory)) - set(committed):
    _log.warning('%s/%s_%d is complete, but had no %s.', directory, PREFIX, step, _COMMIT)
    (directory / f'{PREFIX}_{step}' / _COMMIT).write_text('')


def _uncommitted(directory: epath.Path, committed: Collection[int]) -> list[int]:
  names = (folder.name for folder in directory.iterdir() if re.fullmatch(_NAME, folder.name))
  return sorted({step_of(name) for name in names} - {*committed})


def _is_whole(directory: epath.Path, step: int) -> bool:
  """Whether a checkpoint has its record, and the file of its arrays that is written last."""
  checkpoint = directory / f'{PREFIX}_{step}'
  read, _ = attempt(functools.partial(read_json, checkpoint))
  return read is not None and (checkpoint / 'state' / 'manifest.ocdbt').exists()


def step_of(checkpoint: epath.PathLike) -> int:
  """The step in the name of a checkpoint's directory; ValueError if it has another name."""
  step = epath.Path(checkpoint).name.removeprefix(f'{PREFIX}_')
  if not step.isdecimal():
    raise ValueError(f'{checkpoint} is a checkpoint, so its folder must be named {PREFIX}_STEP')
  return int(step)


def find(path: epath.PathLike) -> epath.Path:
  """The checkpoint at `path`, or the newest one of the run at `path`; ValueError without one."""
  path = epath.Path(path).absolute()
  if (path / 'state').exists():
    return path
  if not path.is_dir():
    what = 'is a file, but no .safetensors or .npz' if path.exists() else 'does not exist'
    raise ValueError(f'{path} {what}: give the directory of a run or checkpoint, or such a file')
  if not (found := steps(path)):
    inside = sorted(path.iterdir())
    runs = [folder.name for folder in inside if folder.is_dir() and steps(folder)]
    indices = [x for x in inside if x.name.endswith('.safetensors.index.json')]
    files = [*indices, *(x for x in inside if x.suffix in ('.safetensors', '.npz'))]
    choice = f', but runs: choose from {", ".join(runs)}' if runs else ''
    if files:
      choice = f', but weights: name the file, such as {files[0]}'
    if unfinished := _uncommitted(path, ()):
      name = f'{PREFIX}_{unfinished[-1]}'
      choice = f': {name} has no {_COMMIT}, so its save or copy is unfinished; name it to read it'
    raise ValueError(f'{path} holds no checkpoint{choice}')
  return path / f'{PREFIX}_{max(found)}'


def newest_record(model_dir: epath.PathLike) -> tuple[int, dict[str, Any]] | None:
  """Step and record of the newest checkpoint whose record is intact; None if there is none.

  Reads only, and may be called by one process alone.
  """
  directory = epath.Path(model_dir).absolute()
  for step in sorted(steps(directory), reverse=True):
    if record := intact_record(directory / f'{PREFIX}_{step}'):
      return step, record
  return None


def intact_record(checkpoint: epath.Path) -> dict[str, Any]:
  """The record of a checkpoint; empty if it has none, or a damaged one."""
  read, _ = attempt(functools.partial(read_json, checkpoint))
  return {} if read is None else read.record


def params_shapes(checkpoint: epath.PathLike, ema: bool = False) -> dict[str, tuple[int, ...]]:
  """{'head/kernel': shape, ...} of a checkpoint's parameters; reads no array.

  With `ema`, the shapes of the average that `optimizers.with_ema` keeps; ValueError without one.
  """
  tree, failure = attempt(functools.partial(_metadata, epath.Path(checkpoint)))
  if failure is not None:
    raise Unreadable(checkpoint, one_line(failure)) from failure
  saved = named(tree)
  try:
    prefix = f'{params_root(saved, ema)}/'
  except ValueError as error:
    raise ValueError(f'{checkpoint}: {error}') from error
  return {
    name.removeprefix(prefix): tuple(x.shape)
    for name, x in saved.items()
    if name.startswith(prefix)
  }


def params_root(saved: Collection[str], ema: bool = False) -> str:
  """The prefix of the names of a checkpoint's parameters, or with `ema` of their average.

  The parameters are below 'params', or below 'target' in a checkpoint of t5x.
  """
  if not ema:
    return 'target' if any(name.startswith('target/') for name in saved) else 'params'
  roots = {name.partition(_EMA)[0] for name in saved if _EMA in name}
  if not roots:
    raise ValueError('it holds no average of parameters: the run was trained without with_ema.')
  return min(roots, key=len) + _EMA.rstrip('/')


def read_params(path: epath.PathLike, ema: bool = False) -> dict[str, np.ndarray]:
  """{'head/kernel': float32 array, ...} on the host, of the checkpoint that `find` finds at `path`.

  With `ema`, reads the average of the parameters.
  """
  folder = find(path)
  shapes = params_shapes(folder, ema).items()
  wanted = {name: _on_host(shape, jnp.float32) for name, shape in shapes}
  return {name: np.asarray(x) for name, x in read_params_to(folder, wanted, ema).items()}


def read_params_to(
  checkpoint: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct], ema: bool = False
) -> dict[str, jax.Array]:
  """Some parameters of a checkpoint, or of their average, with the given dtypes and shardings."""
  description, saved = describe(checkpoint)
  root = params_root(saved, ema)
  read = read_to(checkpoint, {f'{root}/{name}': x for name, x in wanted.items()}, description)
  return {name: read[f'{root}/{name}'] for name in wanted}


def read_state(path: epath.PathLike) -> dict[str, np.ndarray]:
  """All arrays of the checkpoint that `find` finds at `path`, as saved, on the host.

  The result is {'params/head/kernel': array, 'opt_state/...': array, 'step': array}.
  """
  folder = find(path)
  description, saved = describe(folder)
  wanted = {name: _on_host(x.shape, x.dtype) for name, x in saved.items()}
  return {name: np.asarray(x) for name, x in read_to(folder, wanted, description).items()}


def read_to(
  checkpoint: epath.Path,
  wanted: Mapping[str, jax.ShapeDtypeStruct],
  description: Description | None,
) -> dict[str, jax.Array]:
  """Some arrays of a checkpoint by name, with the given dtypes and shardings.

  Raises Unreadable if one differs from what was saved, as the description tells.
  """
  # Not through an orbax Checkpointer, at whose barrier the others would wait for a process that
  # cannot read.
  handler = ocp.PyTreeCheckpointHandler()

  def target(path: tuple[Any, ...], x: Any) -> Any:
    if (name := _name(path)) not in wanted:
      return ocp.PLACEHOLDER
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted[name].sharding)

  def read() -> dict[str, jax.Array]:
    item = jax.tree_util.tree_map_with_path(target, _metadata(checkpoint), is_leaf=_has_shape)
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item, restore_args=restore_args)
    arrays = named(handler.restore(checkpoint / 'state', args=args))
    return {name: arrays[name] for name in wanted}

  arrays = _on_all(checkpoint, read)
  if description is None:
    _log.warning('%s has no checksums: damaged arrays may go unnoticed.', checkpoint)
  else:
    found = checksum.array_checksums(arrays)
    damaged = [name for name, value in found.items() if value != description.checksums[name]]
    others = f' ({len(damaged)} such arrays)' if len(damaged) > 1 else ''
    reason = f'{damaged[0]} differs from what was saved{others}.' if damaged else ''
    if reasons := processes.gather(reason):
      raise Unreadable(checkpoint, processes.as_one(reasons))
  return {name: cast(x, wanted[name].dtype) for name, x in arrays.items()}


def read_dataset_state(path: epath.PathLike) -> dict[str, int] | None:
  """The input position in the checkpoint that `find` finds at `path`; None if it has none."""
  folder = find(path) / 'dataset'
  return ocp.JsonCheckpointHandler().restore(folder) if folder.exists() else None


def describe(checkpoint: epath.Path) -> tuple[Description | None, dict[str, Any]]:
  """JSON of a checkpoint (None if it has no record) and metadata of its arrays by name."""

  def read() -> tuple[Description | None, dict[str, Any]]:
    saved = named(_metadata(checkpoint))
    description = read_json(checkpoint)
    if description is not None and set(description.checksums) != set(saved):
      raise ValueError('its arrays differ from what was saved')
    return description, saved

  return _on_all(checkpoint, read)


def read_json(checkpoint: epath.Path) -> Description | None:
  """JSON of a checkpoint; None without a record, as in t5x. Raises any exception if damaged."""
  if not (checkpoint / 'record').exists():
    return None
  record = ocp.JsonCheckpointHandler().restore(checkpoint / 'record')
  dataset_state = read_dataset_state(checkpoint)
  if record.pop(_DIGEST, None) != checksum.json_digest([record, dataset_state]):
    raise ValueError('its record or its input position differs from what was saved')
  name = f'{PREFIX}_{record.pop(_STEP)}'
  if name != checkpoint.name and re.fullmatch(_NAME, checkpoint.name):
    raise ValueError(f'it is {name} under another name')
  checksums = record.pop(_CHECKSUMS)
  return Description(record, dataset_state, checksums)


def seal(
  record: Mapping[str, Any],
  dataset_state: Mapping[str, int] | None,
  checksums: Mapping[str, int],
  step: int,
) -> dict[str, Any]:
  """The record with step, checksums and digest, as it is saved and as `read_json` undoes it."""
  record = {**record, _STEP: step, _CHECKSUMS: dict(checksums)}
  return {**record, _DIGEST: checksum.json_digest([record, dataset_state])}


def check_match(
  checkpoint: epath.PathLike,
  wanted: Mapping[str, tuple[int, ...]],
  saved: Mapping[str, tuple[int, ...]],
) -> None:
  """ValueError on all processes if the shapes of a checkpoint's arrays differ from a run's."""
  if reasons := processes.gather(_mismatch(wanted, saved)):
    raise ValueError(f'{checkpoint} {next(iter(reasons.values()))}')


def _mismatch(wanted: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> str:
  # Parameters first: if they differ the optimizer state does too, under less telling names.
  for name, shape in sorted(wanted.items(), key=lambda item: not item[0].startswith('params/')):
    if name not in saved:
      return f'has no {name}, which this run has with shape {shape}.'
    if saved[name] != shape:
      return f'holds {name} with shape {saved[name]}, but this run has {shape}.'
  if extra := sorted(set(saved) - set(wanted)):
    return f'holds {extra[0]}, which this run does not have ({len(extra)} such).'
  return ''


def _metadata(checkpoint: epath.Path) -> PyTree:
  """The tree of a checkpoint's arrays, with their shapes and dtypes in place of values."""
  state = checkpoint / 'state'
  file = state / '_METADATA'
  written = file.stat() if file.exists() else None  # an older orbax wrote none
  return _read_metadata(state, written and (written.mtime, written.length))


# orbax opens every array twice for it, and who opens a run asks five times. A complete checkpoint
# does not change. If another one took its place, the time and the length tell.
@functools.lru_cache(maxsize=4)
def _read_metadata(state: epath.Path, written: tuple[int, int] | None) -> PyTree:
  del written
  return ocp.PyTreeCheckpointHandler().metadata(state).tree


def named(tree: PyTree) -> dict[str, Any]:
  """Arrays, shapes or metadata of arrays by name ('params/head/kernel')."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_has_shape)
  return {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _has_shape(x: Any) -> bool:
  return hasattr(x, 'shape')


def _on_host(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend='cpu')[0])
  return jax.ShapeDtypeStruct(shape, dtype, sharding=device)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
  """A floating-point array in another type; other arrays unchanged."""
  return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def attempt(fn: Callable[[], Any]) -> tuple[Any, Exception | None]:
  """(result, None), or (None, the exception that a damaged file or a full disk caused)."""
  try:
    return fn(), None
  except Exception as error:  # tensorstore, orbax and json each raise their own types
    return None, error


def _on_all(checkpoint: epath.PathLike, fn: Callable[[], Any]) -> Any:
  """Result of `fn`, which all processes call at the same time; Unreadable if it raises on one."""
  result, failure = attempt(fn)
  if reasons := processes.gather('' if failure is None else one_line(failure)):
    raise Unreadable(checkpoint, processes.as_one(reasons)) from failure
  return result


def one_line(error: BaseException) -> str:
  """The cause of an error in one line."""
  text = ' '.join(str(error).split())
  if code := re.search(r"os_error_code='(\d+)'", text):  # tensorstore wraps it in a page of text
    return os.strerror(int(code[1]))
  text = text.partition(' [source locations=')[0]
  return f'{type(error).__name__}: {text}' if text else type(error).__name__
