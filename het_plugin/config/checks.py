"""Checks gin bindings against the annotations of the configurables, before anything runs.

A range is stated beside the type, as an interval: `b1: Annotated[float, '[0, 1)']`. Regular
expressions are `Annotated[str, REGEX]`. Results of references (@name()) are not checked.
"""

import collections.abc
import dataclasses
import difflib
import inspect
import math
import os
import re
import types
import typing
from typing import Any

import gin
from het_plugin.config import statements

REGEX = 'regular expression'
_SIMILAR = 0.9  # least similarity of an unused macro to a used one that was probably meant
_SCALARS = {bool: 'True or False', int: 'a whole number', float: 'a number', str: "text: '...'"}
_LITERALS = (bool, int, float, str, list, tuple, dict)


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


def _mismatch(value: Any, hint: Any) -> str | None:
  """What a value must be instead; None if it fits or if only the run can tell."""
  origin = typing.get_origin(hint)
  arguments = typing.get_args(hint)
  if isinstance(value, statements.Macro) or getattr(value, 'called', False):
    return None
  if origin is typing.Annotated:
    if not isinstance(arguments[1], str):  # another library's
      return _mismatch(value, arguments[0])
    return _mismatch(value, arguments[0]) or _out_of_range(value, arguments[1])
  if origin in (typing.Union, types.UnionType):
    if any(inspect.isclass(x) and issubclass(x, os.PathLike) for x in arguments):
      right = value and isinstance(value, str) or value is None and types.NoneType in arguments
      return None if right else 'a path'
    expected = dict.fromkeys(_mismatch(value, argument) or '' for argument in arguments)
    return None if '' in expected else ' or '.join(expected)
  if hint in (None, types.NoneType):
    return None if value is None else 'None'
  if hint is float:
    return None if type(value) in (int, float) else _SCALARS[float]
  if hint in _SCALARS:
    return None if type(value) is hint else _SCALARS[hint]
  if origin is typing.Literal:
    return None if value in arguments else f'one of {", ".join(map(repr, arguments))}'
  if origin is collections.abc.Callable:
    return 'a function: @name' if isinstance(value, _LITERALS) else None
  if origin in (tuple, list, collections.abc.Sequence, collections.abc.Iterable):
    return _mismatch_of_items(value, origin, arguments)
  if origin in (dict, collections.abc.Mapping):
    if not isinstance(value, dict):
      return 'a dict: {...}'
    pairs = [(x, arguments[i]) for pair in value.items() for i, x in enumerate(pair)]
    expected = next(filter(None, (_mismatch(*pair) for pair in pairs)), None)
    return expected and f'a dict, each value {expected}'
  if not inspect.isclass(hint) or getattr(hint, '_is_protocol', False):
    return None
  known = hint.__module__.split('.')[0] in ('het_plugin', 'flax') or issubclass(hint, os.PathLike)
  not_made = isinstance(value, (*_LITERALS, statements.Reference))
  if known and not_made and not isinstance(value, hint):
    return 'a path' if issubclass(hint, os.PathLike) else f'a {hint.__name__}: @...()'
  return None


def _mismatch_of_items(value: Any, origin: Any, arguments: tuple[Any, ...]) -> str | None:
  if not isinstance(value, (list, tuple)):
    return 'a list: (..., ...)'
  if origin is tuple and arguments[-1] is not Ellipsis:
    if len(value) != len(arguments):
      return f'a list of {len(arguments)}'
    pairs = zip(value, arguments, strict=True)
  else:
    pairs = ((x, arguments[0]) for x in value)
  expected = next(filter(None, (_mismatch(*pair) for pair in pairs)), None)
  return expected and f'a list, each part {expected}'


def _out_of_range(value: Any, allowed: str) -> str | None:
  if allowed == REGEX:
    try:
      re.compile(value)
    except re.error as error:
      return f'a regular expression: {error}'
    return None
  interval = re.fullmatch(r'([\[(])(\S+), (\S+)([\])])', allowed)
  if interval is None:
    return None
  left, low, high, right = interval.groups()
  above = value > float(low) or (left == '[' and value == float(low))
  below = value < float(high) or (right == ']' and value == float(high))
  return None if above and below and not math.isnan(value) else f'in {allowed}'
