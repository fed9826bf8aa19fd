"""Checks gin bindings against the annotations of the configurables, before anything runs.

Ranges are as in `system.ranges`. Of the result of a reference (@name()) only the class is checked,
where a number or a text belongs.
"""

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import gin
from het_plugin.config import statements
from het_plugin.system import ranges

_PLAIN = (bool, int, float, str, type(None))
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
    if hint is not None and (expected := _mismatch(expanded, hint)):
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


def _mismatch(value: Any, hint: Any) -> str | None:
  """`ranges.mismatch` of a binding; an object never fits where only plain values do."""
  is_plain = all(x in _PLAIN for x in _parts(hint))
  if isinstance(value, statements.Reference) and value.called and is_plain:
    return ranges.mismatch(object(), hint) if _makes_object(value.name) else None
  return ranges.mismatch(value, hint, _is_open)


def _parts(hint: Any) -> Iterator[Any]:
  """The types that a union consists of, without ranges."""
  if typing.get_origin(hint) is typing.Annotated:
    hint = typing.get_args(hint)[0]
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    for part in typing.get_args(hint):
      yield from _parts(part)
  else:
    yield hint


def _makes_object(name: str) -> bool:
  """Whether a configurable is a class of ours, or a function that is said to return one."""
  try:
    configurable = gin.get_configurable(name.rpartition('/')[2])
  except ValueError:
    return False
  made = configurable
  if not inspect.isclass(made):
    made = inspect.signature(inspect.unwrap(configurable)).return_annotation
  return inspect.isclass(made) and made not in (*_PLAIN, inspect.Signature.empty)


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
