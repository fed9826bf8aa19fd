"""Reads the text of a gin configuration as values, without importing anything that it names."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gin import config_parser


@dataclasses.dataclass(frozen=True)
class Reference:
  """@scope/name, or with parentheses the result of a call."""

  name: str
  called: bool

  def __repr__(self) -> str:
    return f'@{self.name}{"()" if self.called else ""}'


@dataclasses.dataclass(frozen=True)
class Macro:
  """%NAME."""

  name: str

  def __repr__(self) -> str:
    return f'%{self.name}'


class _Delegate(config_parser.ParserDelegate):
  def configurable_reference(self, scoped_configurable_name, evaluate):
    return Reference(scoped_configurable_name, evaluate)

  def macro(self, macro_name):
    return Macro(macro_name)


def statements(text: str) -> Iterator[tuple[str | None, Any]]:
  """(key, statement): the key is 'scope/configurable.parameter', a macro's name, or None."""
  for statement in config_parser.ConfigParser(text, _Delegate()):
    key = None
    if isinstance(statement, config_parser.BindingStatement):
      key = f'{statement.scope}/{statement.selector}'.lstrip('/')
      if statement.arg_name:
        key = f'{key}.{statement.arg_name}'
    yield key, statement


def parse(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """({'scope/configurable.parameter': value}, {macro: value}); references are not resolved."""
  bound = {}
  macros = {}
  for key, statement in statements(text):
    if key is not None:
      (bound if statement.arg_name else macros)[key] = statement.value
  return bound, macros


def bindings(text: str) -> dict[str, Any]:
  """The bindings of `parse` with macros replaced by their values; constants stay names."""
  bound, macros = parse(text)
  return {key: expand(value, macros) for key, value in bound.items()}


def split(key: str) -> tuple[str, str, str]:
  """('a/b', 'name', 'parameter') of 'a/b/module.name.parameter'."""
  path, _, parameter = key.rpartition('.')
  scope, _, selector = path.rpartition('/')
  return scope, selector.rpartition('.')[2], parameter


def place(reference: Reference) -> tuple[str, str]:
  """('a/b', 'name') of @a/b/module.name."""
  scope, _, selector = reference.name.rpartition('/')
  return scope, selector.rpartition('.')[2]


def holds(scope: str, at: str) -> bool:
  """Whether a binding of a scope applies in another: 'a' applies in 'a/b', and '' in all."""
  return not scope or f'{at}/'.startswith(f'{scope}/')


def expand(value: Any, macros: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
  """A value with macros replaced; ValueError if one refers to itself."""
  if isinstance(value, Macro) and value.name in macros:
    if value.name in within:
      raise ValueError(f'the macro {value.name} refers to itself: {macros[value.name]!r}')
    return expand(macros[value.name], macros, (*within, value.name))
  if isinstance(value, dict):
    return {expand(k, macros, within): expand(v, macros, within) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(expand(x, macros, within) for x in value)
  return value


def inside(value: Any, kind: type) -> Iterator[Any]:
  """The references, or the macros, in a value."""
  if isinstance(value, kind):
    yield value
  elif isinstance(value, dict):
    yield from inside([*value, *value.values()], kind)
  elif isinstance(value, (list, tuple)):
    for x in value:
      yield from inside(x, kind)


def without(text: str, keys: Collection[str], module: str) -> str:
  """The text of a configuration without some bindings and one import; macros stay."""
  kept = []
  for key, statement in statements(text):
    if isinstance(statement, config_parser.ImportStatement) and statement.module != module:
      kept.append(statement.format())
    elif key is not None and key not in keys:
      kept.append(f'{key} = {statement.value!r}')
  return ''.join(f'{line}\n' for line in kept)
