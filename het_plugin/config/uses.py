"""Which settings a run uses, found in the text of its configuration.

gin calls `train`, and for its arguments whatever they refer to. A binding is used if such a call
takes its value. Of several bindings of a parameter, the call takes the one with the longest scope.
A macro is used if a value that is used refers to it. A configurable of another package may be
called from anywhere, so its bindings count as used.
"""

import dataclasses
import difflib
import functools
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from het_plugin.config import parsing, registry, statements

_log = logging.getLogger(__name__)

_ROOT = 'train'
_SIMILAR = 0.6  # least similarity of a macro to one that was probably meant
_Place = tuple[str, str]  # scope and name of a configurable that is called


@dataclasses.dataclass(frozen=True)
class Uses:
  """A configuration, and what its run uses of it.

  Attributes:
    settings: {'scope/configurable.parameter' or macro: value}, references not resolved.
    used: the keys of those that are used.
    places: scope and name of the configurables that are called.
  """

  settings: Mapping[str, Any]
  used: frozenset[str]
  places: frozenset[_Place]

  def hiding(self, key: str) -> list[str]:
    """The bindings that all calls take for which an unused binding was meant."""
    scope, name, parameter = statements.split(key)
    called = [at for at, other in self.places if other == name and statements.holds(scope, at)]
    if key in self.used or not called:
      return []
    return sorted(other for other in self.used if statements.split(other)[1:] == (name, parameter))

  def unused(self, key: str, value: Any) -> str:
    """Says that a setting is not used, and which used one was probably meant."""
    shown = f'{key} = {value!r} is used by nothing'
    _, name, parameter = statements.split(key)
    if not name:
      macros = [macro for macro in self.used if not statements.split(macro)[1]]
      of_initials = [macro for macro in macros if ''.join(x[:1] for x in macro.split('_')) == key]
      similar = of_initials or difflib.get_close_matches(key, macros, 1, _SIMILAR)
      if any(re.search(rf'%{key}\b', text) for text in _our_files()):
        similar = []  # a name of another run, or whose place was bound anew, and no misspelling
      hint = f'did you mean {similar[0]}?' if similar else f'nothing refers to %{key}'
    elif same := [x for x in self.used if statements.split(x)[1:] == (name, parameter)]:
      hint = f'the run takes {" and ".join(sorted(same))}'
    elif any(called == name for _, called in self.places):
      hint = f'did you mean {name}.{parameter}?'
    else:
      hint = self._alternative(name) or f'nothing refers to @{name}'
    return f'{shown}: {hint}'

  def _alternative(self, name: str) -> str | None:
    """The macro that has a part of the same room of the model: 'HEAD is @Det()' for HetXL."""
    rooms = {f'het_plugin.{room}' for room in registry.MODEL_ROOMS}
    rooms &= {room for room, known in registry.registered if known == name}
    for macro in sorted(key for key in self.used if '.' not in key):
      value = self.settings[macro]
      if isinstance(value, statements.Reference):
        if {(room, statements.place(value)[1]) for room in rooms} & registry.registered:
          return f'{macro} is {value!r}'
    return None


def of(text: str, called: Sequence[str] = ()) -> Uses:
  """What the run of a configuration (`gin.config_str()`) uses; all, if it does not bind `train`.

  `called` are the names of further configurables that a command itself calls or reads.
  """
  bound, macros = statements.parse(text)
  ours = {name for _, name in registry.registered}
  by_name = {}  # {name: {parameter: {scope: key}}}
  pending = {('', name) for name in (_ROOT, *called)}
  for key in bound:
    scope, name, parameter = statements.split(key)
    by_name.setdefault(name, {}).setdefault(parameter, {})[scope] = key
    if name not in ours:
      pending.add((scope, name))
  used = set()
  places = set()

  def follow(value: Any, at: str) -> Iterator[_Place]:
    """The calls that a value leads to in a scope."""
    for reference in statements.inside(value, statements.Reference):
      scope, name = statements.place(reference)
      yield scope or at, name
      if not reference.called:  # it may be called later, outside this scope
        yield scope, name
    for macro in statements.inside(value, statements.Macro):
      if macro.name in macros and macro.name not in used:
        used.add(macro.name)
        yield from follow(macros[macro.name], macro.name)  # gin reads it in a scope of its name

  while pending:
    at, name = place = pending.pop()
    places.add(place)
    for keys in by_name.get(name, {}).values():
      if scopes := [scope for scope in keys if statements.holds(scope, at)]:
        key = keys[max(scopes, key=len)]
        used.add(key)
        pending |= set(follow(bound[key], at)) - places
  settings = {**bound, **macros}
  return Uses(settings, frozenset(used if _ROOT in by_name else settings), frozenset(places))


def check_typed(typed: Sequence[str], runs: Sequence[Uses]) -> None:
  """Raises ValueError if none of the runs uses a binding of the command line, 'NAME = VALUE'."""
  used = {statements.split(key) for run in runs for key in run.used}
  for binding in typed:
    for settings in statements.parse(binding):
      for key, value in settings.items():
        if statements.split(key) not in used:
          raise ValueError(runs[0].unused(key, value))


def check(typed: Sequence[str], *texts: str) -> None:
  """Checks that what was set for a training is used, by at least one of several that share it.

  Args:
    typed: bindings of a command line, 'NAME = VALUE'.
    texts: configurations (`gin.config_str()`) with these bindings, one or more.

  Raises:
    ValueError: nothing uses a typed binding, or one of a file in whose place all calls take those
      of this package's files. Other settings of files may be meant for another head or overridden
      on purpose. They are a warning, unless they are of this package's files too.
  """
  runs = [of(text) for text in texts]
  check_typed(typed, runs)
  used = {statements.split(key) for run in runs for key in run.used}
  unused = {
    (key, repr(value)): run
    for run in runs
    for key, value in run.settings.items()
    if statements.split(key) not in used
  }
  shipped = _shipped({statements.split(key)[1] or key for key, _ in unused})
  found = []
  for key, text in sorted(unused.keys() - shipped):
    run = unused[key, text]
    found.append(run.unused(key, run.settings[key]))
    hiding = run.hiding(key)
    if hiding and {(other, repr(run.settings[other])) for other in hiding} <= shipped:
      raise ValueError(found[-1])
  if found:
    _log.warning('%s', '; '.join(found))


def _shipped(names: Collection[str]) -> set[tuple[str, str]]:
  """(key, text of its value) of what our gin files set, if not more than for these names."""
  return {
    (key, repr(value))
    for text in _our_files()
    if any(name in text for name in names)
    for settings in statements.parse(text)
    for key, value in settings.items()
  }


@functools.cache
def _our_files() -> tuple[str, ...]:
  """The texts of this package's gin files."""
  return tuple(path.read_text() for path in parsing.gin_root().rglob('*.gin'))
