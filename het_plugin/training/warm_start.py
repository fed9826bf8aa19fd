"""Initial parameters from a checkpoint of another run, or from a published file."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import traverse_util

from het_plugin import weights
from het_plugin.training import checkpoint_reader, class_names
from het_plugin.training.checkpoints import RestoreCheckpointConfig

_log = logging.getLogger(__name__)

PyTree = Any

_SHOWN = 4  # names of parameters in an error


def restore_params(
  cfg: RestoreCheckpointConfig,
  target: PyTree,
  model: Any = None,
  names: Sequence[str] | None = None,
) -> dict[str, jax.Array]:
  """Reads parameters for a warm start; all processes call it together.

  The target is the model's parameters as shapes with shardings. The result is {'head/kernel':
  array, ...} on these, without parameters that are to be initialised. A
  published file must have the attention heads, and a head the classes, of the `model`, if it is
  given. A head that is kept must have classes of these `names`, if the checkpoint's run has names
  too.
  """
  flat = traverse_util.flatten_dict(target, sep='/')
  assignment_map = [*cfg.assignment_map]
  for pattern, _ in assignment_map:
    if not any(re.fullmatch(pattern, name) for name in flat):
      raise ValueError(
        f'RestoreCheckpointConfig.assignment_map has {pattern!r}, which matches no parameter of '
        f'the model: {", ".join(sorted(flat)[:_SHOWN])}, ...'
      )
  if weights.is_weights_file(cfg.path):
    return _read_published(cfg, flat, model)
  if cfg.skip:
    raise ValueError(
      f'RestoreCheckpointConfig.skip={cfg.skip!r} is for a published file; {cfg.path} is a '
      'checkpoint: use assignment_map or fallback_to_scratch'
    )
  if cfg.head == weights.INIT:
    assignment_map = [('head/.*', None), *assignment_map]
  path = _checkpoint(cfg)
  saved = checkpoint_reader.params_shapes(path, cfg.ema)
  source = {name: _source_name(name, assignment_map) for name in flat}
  if cfg.head == weights.INIT:
    saved = {name: shape for name, shape in saved.items() if not name.startswith('head/')}
  source = {name: found for name, found in source.items() if found is not None}
  if cfg.fallback_to_scratch:
    source = {name: found for name, found in source.items() if found in saved}
    _log.info('From scratch: %s.', ', '.join(sorted(set(flat) - set(source))) or 'nothing')
    _log.info('Not used: %s.', ', '.join(sorted(set(saved) - set(source.values()))) or 'nothing')
    if not source:
      raise ValueError(
        f'RestoreCheckpointConfig.path={cfg.path} has none of the parameters of the model '
        f'({", ".join(sorted(flat)[:_SHOWN])}, ...), but {", ".join(sorted(saved)[:_SHOWN])}, ...: '
        'RestoreCheckpointConfig.assignment_map can rename them'
      )
    saved = {found: saved[found] for found in source.values()}
  if names and 'head/kernel' in source:
    _check_classes(cfg, names, class_names.read(path))
  wanted = {found: flat[name] for name, found in source.items()}
  if len(wanted) < len(source):  # one array cannot be donated to a step twice
    twice = max(wanted, key=[*source.values()].count)
    names_of = ' and '.join(sorted(name for name, found in source.items() if found == twice))
    raise ValueError(
      f'RestoreCheckpointConfig.assignment_map reads {names_of} from {twice}: one parameter of the '
      'checkpoint must be read for one of the model'
    )
  checkpoint_reader.check_match(path, {name: x.shape for name, x in wanted.items()}, saved)
  read = checkpoint_reader.read_params_to(path, wanted, cfg.ema)
  _log.info('Parameters from %s: %d of %d.', path, len(source), len(flat))
  return {name: read[found] for name, found in source.items()}


def _checkpoint(cfg: RestoreCheckpointConfig) -> epath.Path:
  path = epath.Path(cfg.path).absolute()
  is_checkpoint = (path / 'state').exists()
  if not is_checkpoint and (cfg.mode == 'specific' or not checkpoint_reader.steps(path)):
    what = 'is not a checkpoint' if cfg.mode == 'specific' else 'holds no checkpoint'
    raise ValueError(f'RestoreCheckpointConfig.path={cfg.path} {what} (mode={cfg.mode!r}).')
  return checkpoint_reader.find(path)


def _check_classes(
  cfg: RestoreCheckpointConfig, names: Sequence[str], kept: Sequence[str] | None
) -> None:
  """Raises ValueError for other classes: K is padded, so the shapes of W may be the same."""
  setting = f"RestoreCheckpointConfig.path={cfg.path} (head = 'init' starts the head afresh)"
  if kept and len(kept) != len(names):
    raise ValueError(f'{setting} has {len(kept)} classes, and the task has {len(names)}')
  class_names.check(setting, names, kept)


def _source_name(name: str, assignment_map: Sequence[tuple[str, str | None]]) -> str | None:
  for pattern, replacement in assignment_map:
    if re.fullmatch(pattern, name):
      return None if replacement is None else re.sub(f'^(?:{pattern})$', replacement, name)
  return name


def _read_published(
  cfg: RestoreCheckpointConfig,
  flat: Mapping[str, jax.ShapeDtypeStruct],
  model: Any,
) -> dict[str, jax.Array]:
  renames = [pair for pair in cfg.assignment_map if pair[1] is not None]
  for name, value in (('ema', cfg.ema), ('assignment_map', renames)):
    if value:
      raise ValueError(
        f'RestoreCheckpointConfig.{name}={value!r} is for a checkpoint; {cfg.path} is a published '
        'file, which has no average, and whose names are known: leave it out'
      )
  try:
    arrays = weights.read_arrays(cfg.path)
    read = from_published(cfg.path, arrays, flat, model, cfg.head, cfg.skip)
  except ValueError as error:
    raise ValueError(f'RestoreCheckpointConfig.path={cfg.path}: {error}') from error
  if fresh := {name for name in read if _source_name(name, cfg.assignment_map) is None}:
    _log.info('From scratch: %s.', ', '.join(sorted(fresh)))
  return {name: x for name, x in read.items() if name not in fresh}


def from_published(
  path: epath.PathLike,
  arrays: Mapping[str, np.ndarray],
  flat: Mapping[str, jax.ShapeDtypeStruct],
  model: Any,
  head: str,
  skip: Sequence[str] = (),
) -> dict[str, jax.Array]:
  """Parameters from the arrays of a published file, with the shapes and shardings of `flat`.

  `head` and `skip` are as in `weights.load_params`. The file must have the attention heads, and a
  head the classes, of the model.

  Raises:
    ValueError: the arrays do not fit.
  """
  shapes = {name: x.shape for name, x in flat.items()}
  num_classes = getattr(getattr(model, 'head', None), 'num_classes', None)
  num_heads = getattr(getattr(model, 'backbone', None), 'num_heads', None)
  config = weights.read_config(path)
  read, report = weights.load_params(arrays, shapes, head, skip, config, num_classes, num_heads)
  report.log(path)
  return {
    name: jax.make_array_from_callback(x.shape, flat[name].sharding, x.__getitem__)
    for name, x in read.items()
  }
