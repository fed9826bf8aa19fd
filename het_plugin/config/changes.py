"""What changed in the gin configuration of a run since its newest checkpoint was saved, and whether
the run is still the same one.

A change of meaning is one of what the model computes, of which examples come in which order, or of
how parameters move. It needs --accept_config_changes. A change of means is one of the mesh, of
memory, of what is evaluated, reported and saved, and of when the run ends. It is logged.

Everything counts as meaning, also the bindings of configurables that are not ours, except
  - the parameters of `MEANS`;
  - what only evaluations and actions reach: bindings of `train_eval/DatasetConfig`, for example;
  - `warmup_schedule.total_steps`, and `total_steps`, where the learning rate does not decay towards
    them.

Works on the text of configurations (`gin.config_str()`), so that nothing which they name need be
there.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from gin import config_parser
from het_plugin.training import run_files

_log = logging.getLogger(__name__)

CONFIG = 'config.gin'
_UNTIL = 'config_until_'  # before the last step of a configuration that was replaced

_ALL = None
# Parameters of which a change is one of means, by configurable.
MEANS: Mapping[str, Sequence[str] | None] = {
  'train': (
    *('model_dir', 'train_eval_dataset_cfg', 'infer_eval_dataset_cfg', 'checkpoint_cfg'),
    *('partitioner', 'total_steps', 'eval_steps', 'eval_period', 'stats_period', 'actions'),
    *('profile_steps', 'profiler_port', 'nonfinite', 'loss_spikes'),
  ),
  'Trainer': ('num_microbatches', 'norm_groups'),
  'HeldOutTemperatureTrainer': ('num_microbatches', 'norm_groups'),
  'NonFinitePolicy': _ALL,
  'LossSpikes': _ALL,
  'PjitPartitioner': _ALL,
  'standard_logical_axis_rules': _ALL,
  'CheckpointConfig': _ALL,
  # Not dtype, which rounds the parameters that a run resumes from, nor save_dataset.
  'SaveCheckpointConfig': ('period', 'keep'),
  'RestoreCheckpointConfig': _ALL,  # a run that is resumed has started already
  'DatasetConfig': ('max_corrupt_fraction',),
  'ClassificationModel': ('eval_integrator', 'eval_seed'),
  # The same draws. Not num_samples and sampler: log of a mean, the loss is biased by them.
  'Integrator': ('order', 'chunk_size', 'chunk_bytes', 'class_shards', 'implementation'),
  'vit': ('remat',),
  'resnet': ('remat',),
  'FewShotAction': _ALL,
  'FewShotDataset': _ALL,
  'TerminateOnNanAction': _ALL,
  'EarlyStoppingAction': _ALL,
}
_NAMED = 3  # changes that the error itself names
_ENDS = ('constant', 'rsqrt')  # decays of warmup_schedule that total_steps ends, and does not shape
# What these parameters refer to trains nothing.
_WITHOUT_TRAINING = {
  ('train', 'train_eval_dataset_cfg'),
  ('train', 'infer_eval_dataset_cfg'),
  ('train', 'actions'),
  ('ClassificationModel', 'eval_integrator'),
}

_Place = tuple[str, str]  # scope and name of a configurable, as it is called


@dataclasses.dataclass(frozen=True)
class Reference:
  """@scope/name, or with parentheses the result of calling it."""

  name: str
  called: bool

  def __repr__(self) -> str:
    return f'@{self.name}{"()" if self.called else ""}'


@dataclasses.dataclass(frozen=True)
class _Macro:
  name: str

  def __repr__(self) -> str:
    return f'%{self.name}'


class _Unset:
  def __repr__(self) -> str:
    return '(not set)'


UNSET = _Unset()


class _Delegate(config_parser.ParserDelegate):
  def configurable_reference(self, scoped_configurable_name, evaluate):
    return Reference(scoped_configurable_name, evaluate)

  def macro(self, macro_name):
    return _Macro(macro_name)


def bindings(text: str) -> dict[str, Any]:
  """{'scope/configurable.parameter': value} of a configuration as text.

  Macros are replaced by their values, but for constants, which the text does not have. References
  stay what they are (`Reference`).

  Raises:
    SyntaxError: the text is not gin's.
  """
  bound, macros = {}, {}
  for statement in config_parser.ConfigParser(text, _Delegate()):
    if isinstance(statement, config_parser.BindingStatement):
      name = f'{statement.scope}/{statement.selector}'.lstrip('/')
      if statement.arg_name:
        bound[f'{name}.{statement.arg_name}'] = statement.value
      else:
        macros[name] = statement.value
  return {key: _expand(value, macros) for key, value in bound.items()}


def without(text: str, keys: Collection[str], module: str) -> str:
  """A configuration as text without some bindings and an import.

  Args:
    text: as of `gin.config_str()`.
    keys: as those of `bindings`; macros have none.
    module: the one that is imported.
  """
  kept = []
  for statement in config_parser.ConfigParser(text, _Delegate()):
    if isinstance(statement, config_parser.ImportStatement):
      if statement.module != module:
        kept.append(statement.format())
    elif isinstance(statement, config_parser.BindingStatement):
      name = f'{statement.scope}/{statement.selector}'.lstrip('/')
      key = f'{name}.{statement.arg_name}' if statement.arg_name else name
      if key not in keys:
        kept.append(f'{key} = {statement.value!r}')
  return ''.join(f'{line}\n' for line in kept)


def _expand(value: Any, macros: Mapping[str, Any]) -> Any:
  if isinstance(value, _Macro) and value.name in macros:
    return _expand(macros[value.name], macros)
  if isinstance(value, dict):
    return {_expand(k, macros): _expand(v, macros) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(_expand(x, macros) for x in value)
  return value


def _split(key: str) -> tuple[str, str, str]:
  """('a/b', 'name', 'parameter') of 'a/b/module.name.parameter'."""
  path, _, parameter = key.rpartition('.')
  scope, _, selector = path.rpartition('/')
  return scope, selector.rpartition('.')[2], parameter


def _references(value: Any) -> Iterator[_Place]:
  if isinstance(value, Reference):
    scope, _, selector = value.name.rpartition('/')
    yield scope, selector.rpartition('.')[2]
  elif isinstance(value, dict):
    yield from _references([*value, *value.values()])
  elif isinstance(value, (list, tuple)):
    for x in value:
      yield from _references(x)


def _applies(key: str, places: Iterable[_Place]) -> bool:
  """Whether a binding is one of what is called at these places; one of scope 'a' is also one of
  what is called in scope 'a/b', one without a scope of all.
  """
  scope, name, _ = _split(key)
  return any(
    name == called and (not scope or f'{at}/'.startswith(f'{scope}/')) for at, called in places
  )


def _reached(config: Mapping[str, Any], start: Iterable[Any]) -> set[_Place]:
  """What the values refer to, and what the bindings of that refer to, and so on."""
  reached, new = set(), {place for value in start for place in _references(value)}
  while new:
    reached |= new
    new = {
      (scope or at, name)  # a reference without a scope stays in that of the caller
      for at, called in new
      for key, value in config.items()
      if _applies(key, [(at, called)])
      for scope, name in _references(value)
    } - reached
  return reached


def _means(config: Mapping[str, Any]) -> set[str]:
  """Keys of the bindings that do not change the meaning of a run."""
  aside = {key for key in config if _split(key)[1:] in _WITHOUT_TRAINING}
  training = {key: value for key, value in config.items() if key not in aside}
  outside = _reached(config, (config[key] for key in aside))
  inside = _reached(
    training, (value for key, value in training.items() if not _applies(key, outside))
  )
  return {
    key
    for key in config
    if _is_means(key, config) or (_applies(key, outside) and not _applies(key, inside))
  }


def _is_means(key: str, config: Mapping[str, Any]) -> bool:
  _, name, parameter = _split(key)
  if (name, parameter) == ('warmup_schedule', 'total_steps'):
    decay = key.removesuffix(parameter) + 'decay'
    return config.get(decay, config.get('warmup_schedule.decay')) in _ENDS
  if name == 'total_steps':  # the function, to which the schedule refers
    return config.get('warmup_schedule.decay') in _ENDS
  parameters = MEANS.get(name, ())
  return parameters is _ALL or parameter in parameters


@dataclasses.dataclass(frozen=True)
class Change:
  """A binding that two configurations do not have alike.

  Attributes:
    key: 'scope/configurable.parameter'.
    before, after: its values; UNSET where it is not bound.
    is_meaning: whether it changes the meaning of a run.
  """

  key: str
  before: Any
  after: Any
  is_meaning: bool

  def __str__(self) -> str:
    return f'{self.key}: {self.before!r} -> {self.after!r}'


def changes(before: str, after: str) -> list[Change]:
  """What changed between two configurations as text, those of meaning first, by name.

  Raises:
    SyntaxError: one of them is not gin's.
  """
  old, new = bindings(before), bindings(after)
  old_means, new_means = _means(old), _means(new)
  found = []
  for key in sorted({*old, *new}):
    was, is_now = old.get(key, UNSET), new.get(key, UNSET)
    if was != is_now:
      # Means by every configuration that has it.
      is_means = all(key in means for c, means in ((old, old_means), (new, new_means)) if key in c)
      found.append(Change(key, was, is_now, not is_means))
  return sorted(found, key=lambda change: not change.is_meaning)


class RunConfig:
  """The configuration of a run that starts or is resumed.

  Attributes:
    text: as gin text.
  """

  def __init__(self, text: str, accept_changes: bool = False):
    """Takes the text; `accept_changes` lets a run go on whose configuration has another meaning."""
    self.text = text
    self._accept_changes = accept_changes
    self._replaced = None

  def check(self, step: int, record: Mapping[str, Any]) -> None:
    """Compares it with the one in a checkpoint's record, and logs what changed.

    Args:
      step: of the checkpoint.
      record: of the checkpoint; of older runs it has the fingerprint of a configuration only.

    Raises:
      ValueError: the meaning changed, and that is not accepted.
    """
    if 'config' not in record:
      if record['config_fingerprint'] != hashlib.sha256(self.text.encode()).hexdigest():
        _log.warning('The configuration is not the one that the checkpoint was saved with.')
      return
    found = changes(record['config'], self.text)
    if not found:
      return
    meaning = [change for change in found if change.is_meaning]
    lines = ''.join(f'\n  {change}' for change in meaning)
    others = ''.join(f'\n  {change}' for change in found if not change.is_meaning)
    if lines:
      _log.warning('The meaning of the configuration changed since step %d:%s', step, lines)
    if others:
      _log.info('The configuration changed since step %d:%s', step, others)
    if meaning and not self._accept_changes:
      names = ', '.join(change.key for change in meaning[:_NAMED])
      more = f' and {len(meaning) - _NAMED} more' if len(meaning) > _NAMED else ''
      raise ValueError(
        f'the run in this model_dir is another one since its step {step}: {names}{more} changed '
        f'(the lines above say how); undo that, take another model_dir, or go on with '
        '--accept_config_changes'
      )
    if meaning:
      self._replaced = record['config']

  def write(self, model_dir: epath.PathLike, step: int) -> None:
    """Writes config.gin; where a change of meaning was accepted, the configuration until this step
    to config_until_STEP.gin.
    """
    folder = epath.Path(model_dir)
    if self._replaced is not None:
      kept = folder / f'{_UNTIL}{step}.gin'
      run_files.write_text(kept, self._replaced)
      _log.warning('The changes are accepted; %s is the configuration until here.', kept)
    run_files.write_text(folder / CONFIG, self.text)
    _log.info('The configuration is in %s.', folder / CONFIG)


def config_file(checkpoint: epath.Path, step: int) -> epath.Path:
  """The configuration that a checkpoint was trained with: config.gin beside it, or of what replaced
  configurations are there the one until the next step that has one.
  """
  until = {
    int(path.stem.removeprefix(_UNTIL)): path for path in checkpoint.parent.glob(f'{_UNTIL}*.gin')
  }
  later = [last for last in until if last >= step]
  return until[min(later)] if later else checkpoint.parent / CONFIG
