"""Checks gin bindings against the annotations of the configurables, before anything runs.

Ranges are as in `system.ranges`. Results of references (@name()) are not checked.
"""

import dataclasses
import difflib
import inspect
import typing
from typing import Any

import gin
from het_plugin.config import statements
from het_plugin.system import ranges

_SIMILAR = 0.9  # least similarity of an unused macro to a used one that was probably meant


def check(text: str) -> None:
  """Checks a configuration (`gin.config_str()`).

  Raises:
    ValueError: the value of a binding has another type or is out of range, or a macro is unused but
      similar to a used one, or refers to itself; the message names it.
  """
  bound, macros = statements.parse(text)
  values = [*bound.values(), *macros.values()]
  used = {macro.name for macro in statements.inside(values, statements.Macro)}
  for name in macros.keys() - used:
    if similar := difflib.get_close_matches(name, used, 1, _SIMILAR):
      raise ValueError(f'{name} = {macros[name]!r} is used by nothing: did you mean {similar[0]}?')
  for value in macros.values():
    statements.expand(value, macros)  # an error if a macro refers to itself
  for key, value in bound.items():
    path, _, parameter = key.rpartition('.')
    hint = parameters(path.rpartition('/')[2]).get(parameter)
    expanded = statements.expand(value, macros)
    if hint is not None and (expected := ranges.mismatch(expanded, hint, _is_open)):
      shown = f'{key} = {expanded!r}'
      if isinstance(value, statements.Macro):
        shown = f'{value.name} = {expanded!r} ({key})'
      raise ValueError(f'{shown} must be {expected}')


def parameters(name: str) -> dict[str, Any]:
  """The annotations of a configurable's parameters, by name; parameters without one are absent."""
  try:
    configurable = gin.get_configurable(name)
  except ValueError:
    return {}
  if inspect.isclass(configurable):  # gin makes a subclass
    ours = configurable.__mro__[1]
    return _hints(ours if dataclasses.is_dataclass(ours) else ours.__init__)
  hints = _hints(inspect.unwrap(configurable))
  made = hints.pop('return', None)  # `vit` has the fields of the ViT that it returns
  return (_hints(made) if dataclasses.is_dataclass(made) else {}) | hints


def _hints(annotated: Any) -> dict[str, Any]:
  try:
    hints = typing.get_type_hints(annotated, include_extras=True)
    defaults = inspect.signature(annotated).parameters.values()
  except (NameError, TypeError, ValueError):
    return {}
  # `x: int = None` also allows None.
  return hints | {
    x.name: hints[x.name] | None for x in defaults if x.default is None and x.name in hints
  }


def _is_open(value: Any) -> bool:
  """Whether only the run can tell a value."""
  return isinstance(value, statements.Macro) or getattr(value, 'called', False)
