"""Whether a run that is resumed is still the same run, on the same data.

A change of the gin configuration needs --accept_config_changes if it may change the results: what
the model computes, the order of the examples, the update of the parameters. Any other change (the
mesh, memory, evaluation, reports, checkpoints, the end of the run) is logged.

Any binding may change the results, including those of other packages, except
  - parameters that a room lists in the `SAME_RESULTS` of its `__init__.py`;
  - bindings of configurables that only these parameters refer to, such as the data set of an
    evaluation;
  - bindings in whose place all calls take another, of a longer scope;
  - the number of steps, if the learning rate does not decay towards the last one, and its warm-up
    is not a share of them.

The text of two configurations (`gin.config_str()`) is compared, so the names in it need not be
importable.
"""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from etils import epath

from het_plugin.config import registry, statements, uses
from het_plugin.system import run_files

_log = logging.getLogger(__name__)

CONFIG = 'config.gin'
_UNTIL = 'config_until_'  # followed by the last step of a configuration that was replaced
_NAMED = 3  # number of changes that the error names

_Place = tuple[str, str]  # scope and name of a configurable that is called


class _Unset:
  def __repr__(self) -> str:
    return '(not set)'


UNSET = _Unset()


def _references(value: Any) -> Iterator[_Place]:
  return map(statements.place, statements.inside(value, statements.Reference))


def _applies(key: str, places: Iterable[_Place]) -> bool:
  """Whether a binding applies to a configurable that is called at one of these places."""
  scope, name, _ = statements.split(key)
  return any(name == called and statements.holds(scope, at) for at, called in places)


def _reached(config: Mapping[str, Any], keys: Iterable[str]) -> set[_Place]:
  """The configurables that the values of these bindings refer to, directly or indirectly."""
  reached = set()
  new = {place for key in keys for place in _references(config[key])}
  while new:
    reached |= new
    new = {
      (scope or at, name)  # a reference without a scope stays in the scope of its caller
      for at, called in new
      for key, value in config.items()
      if _applies(key, [(at, called)])
      for scope, name in _references(value)
    } - reached
  return reached


def _harmless(text: str, config: Mapping[str, Any]) -> set[str]:
  """Keys of the bindings of a configuration that do not change the results of its run."""
  stated = registry.same_results()

  def of_schedules(parameter: str) -> list[Any]:  # in any scope
    named = ('warmup_schedule', parameter)
    return [value for key, value in config.items() if statements.split(key)[1:] == named]

  share = any(isinstance(steps, float) for steps in of_schedules('warmup_steps'))
  decays = {config.get('warmup_schedule.decay', 'linear'), *of_schedules('decay')}
  used = uses.of(text)
  called = {statements.split(key)[1] for key in used.used}
  of_a_number = 'adamw' in called and 'warmup_schedule' not in called  # adamw.learning_rate = 1e-3
  if of_a_number or not share and decays <= {'constant', 'rsqrt'}:
    stated |= {('warmup_schedule', 'total_steps')}  # these schedules only end there
  aside = {key for key in config if statements.split(key)[1:] in stated}
  rest = {key: value for key, value in config.items() if key not in aside}
  outside = _reached(config, aside)
  inside = _reached(rest, [key for key in rest if not _applies(key, outside)])
  aside |= {key for key in rest if _applies(key, outside) and not _applies(key, inside)}
  return aside | {key for key in config if used.hiding(key)}


@dataclasses.dataclass(frozen=True)
class Change:
  """A binding, 'scope/configurable.parameter', that differs; UNSET where it is not bound.

  `name` is that of the macro that both configurations take the value from, else the key.
  """

  key: str
  before: Any
  after: Any
  changes_results: bool
  name: str

  def __str__(self) -> str:
    return f'{self.name}: {self.before!r} -> {self.after!r}'


def changes(before: str, after: str) -> list[Change]:
  """The differences of two configurations, sorted by name; those that may change results first.

  Raises:
    SyntaxError: one of the texts is not valid gin.
  """
  old, new = map(statements.bindings, (before, after))
  (was, macros_before), (now, macros_after) = map(statements.parse, (before, after))

  def name(key: str) -> str:
    left = was.get(key)
    right = now.get(key)
    found = key
    while isinstance(left, statements.Macro) and left == right:
      found = left.name
      left = macros_before.get(found)
      right = macros_after.get(found)
    return found

  sides = (old, _harmless(before, old)), (new, _harmless(after, new))
  found = [
    Change(
      key,
      old.get(key, UNSET),
      new.get(key, UNSET),
      # A binding is harmless only if it is so in every configuration that has it.
      changes_results=any(key in config and key not in harmless for config, harmless in sides),
      name=name(key),
    )
    for key in sorted({*old, *new})
    if old.get(key, UNSET) != new.get(key, UNSET)
  ]
  return sorted(found, key=lambda change: not change.changes_results)


class RunConfig:
  """The configuration of a run that starts or is resumed, as gin text."""

  def __init__(
    self,
    text: str,
    accept_changes: bool = False,
    how_to_accept: str | None = '--accept_config_changes',
  ):
    """With `accept_changes` a run goes on although its results may change.

    The error names `how_to_accept` them; None where a command has no such flag.
    """
    self.text = text
    self._accept_changes = accept_changes
    self._how_to_accept = how_to_accept
    self._replaced = None
    self._changes: tuple[list[Change], int] = [], 0  # and the step since when

  def check(
    self,
    step: int,
    record: Mapping[str, Any],
    model_dir: epath.PathLike,
    data: Mapping[str, Any] | None = None,
  ) -> None:
    """Compares the configuration with that in a record of model_dir; `write` logs the changes.

    `data` are JSON values about the training data, by what they are. Those that the record has too
    must be the same.

    Raises:
      ValueError: a change may change the results and is not accepted; all changes are logged.
    """
    found = changes(record['config'], self.text)
    others = any(change.changes_results for change in found)
    used = record.get('data', {})
    found = [
      *(
        Change(name, used[name], value, changes_results=True, name=name)
        for name, value in (data or {}).items()
        if used.get(name, value) != value
      ),
      *found,
    ]
    serious = [change for change in found if change.changes_results]
    self._changes = found, step
    if serious and not self._accept_changes:
      self._log_changes()
      changed = [*dict.fromkeys(change.name for change in serious)]
      names = ', '.join(changed[:_NAMED])
      more = f' and {len(changed) - _NAMED} more' if len(changed) > _NAMED else ''
      ways_out = ' or take another directory'
      if self._how_to_accept is not None:
        ways_out = f', take another directory, or continue with {self._how_to_accept}'
      raise ValueError(
        f'{model_dir} holds a run with {"a different configuration" if others else "other data"} '
        f'(from step {step} on): {names}{more} changed (the lines above say how). '
        f'Undo the change{ways_out}'
      )
    self._replaced = record['config'] if others else None

  def _log_changes(self) -> None:
    """Logs what the last `check` found, a line per change, because a screen shows no others."""
    found, step = self._changes
    lines = dict.fromkeys((change.changes_results, str(change)) for change in found)
    for serious, line in lines:
      what = 'What may change the results of this run' if serious else 'The configuration'
      level = logging.WARNING if serious else logging.INFO
      _log.log(level, '%s changed since step %d: %s', what, step, line)

  def write(self, model_dir: epath.PathLike, step: int) -> None:
    """Writes config.gin, and logs the changes, now that the run has a log file.

    If changes were accepted, config_until_STEP.gin keeps the configuration until this step.
    """
    folder = epath.Path(model_dir)
    self._log_changes()
    if self._replaced is not None:
      kept = folder / f'{_UNTIL}{step}.gin'
      run_files.write_text(kept, self._replaced)
      _log.warning('The changes are accepted; %s is the configuration until here.', kept)
    run_files.write_text(folder / CONFIG, self.text)
    _log.info('The configuration is in %s.', folder / CONFIG)


def config_file(checkpoint: epath.Path, step: int) -> epath.Path:
  """The file with the configuration that a checkpoint was trained with.

  This is config.gin beside the checkpoint, or the first config_until_STEP.gin of a later step.
  """
  until = run_files.numbered(checkpoint.parent, _UNTIL, '.gin')
  later = [last for last in until if last >= step]
  return until[min(later)] if later else checkpoint.parent / CONFIG


def warn_of_another(checkpoint: str, file: epath.PathLike, text: str, trained_with: str) -> None:
  """Logs a warning if the configuration in a file gives other results than that in the checkpoint's
  own record, as beside a checkpoint of another run.
  """
  if others := [str(x) for x in changes(text, trained_with) if x.changes_results]:
    more = f' and {len(others) - _NAMED} more' if len(others) > _NAMED else ''
    named = '; '.join(others[:_NAMED])
    message = '%s was not trained with %s (%s%s). Is it a checkpoint of another run?'
    _log.warning(message, checkpoint, file, named, more)
