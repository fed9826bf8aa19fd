"""Ranges of settings: each stands at the type of the setting, and is checked here.

    b1: Annotated[float, '[0, 1)'] = 0.9
    pooling: Literal['token', 'gap'] = 'token'
    depths: Annotated[Sequence[Count], NOT_EMPTY]

A dataclass calls `check(self)` in `__post_init__`; a function has the decorator `checked`. Bindings
of gin are checked earlier, before anything is made, by `config.checks`.
"""

import collections.abc
import functools
import inspect
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

REGEX = 'regular expression'
NOT_EMPTY = 'a list that is not empty'

Count = Annotated[int, '[1, 2147483648)']  # arrays of JAX hold numbers of steps as int32
NotNegative = Annotated[float, '[0, inf)']
Pattern = Annotated[str, REGEX]
Positive = Annotated[float, '(0, inf)']
Rate = Annotated[float, '[0, 1)']
Seeds = Annotated[tuple[Annotated[int, '[0, inf)'], ...], NOT_EMPTY]

_A_LIST = 'a list: '
_EACH = 'a list, each part '
_LITERALS = (bool, int, float, str, list, tuple, dict, types.NoneType)
_SCALARS = {
  bool: (bool, 'True or False'),
  int: (numbers.Integral, 'a whole number'),
  float: (numbers.Real, 'a number'),
  str: (str, "text: '...'"),
}
_INTERVAL = re.compile(r'([\[(])(\S+), (\S+)([\])])')
_Function = TypeVar('_Function', bound=Callable[..., Any])


def check(
  settings: Any, owner: str | None = None, is_open: Callable[[Any], bool] = lambda _: False
) -> None:
  """Checks the fields of a dataclass, which may be a flax module; errors name it `owner`, or else
  as its class. `is_open` is as in `mismatch`.

  Raises:
    ValueError: a value is out of the range at its type; one sentence has setting, value and range.
  """
  owner = type(settings).__name__ if owner is None else owner
  for name, hint in _ranges(type(settings)).items():
    _check(f'{owner}.{name}', getattr(settings, name), hint, is_open)


def check_flags(settings: Any) -> None:
  """`check` of a dataclass whose fields are flags, by their names and as they are typed."""
  for name, hint in _ranges(type(settings)).items():
    value = getattr(settings, name)
    expected = (mismatch(value, hint) or '').removesuffix(' or None')
    if expected.startswith(_A_LIST):  # in Python: flags give lists
      raise ValueError(f'{name}={value!r} must be a list: [{value!r}]')
    if not expected:
      continue
    values = value if isinstance(value, (list, tuple, range)) else [value]
    shown = ','.join(str(x).removesuffix('.0') if isinstance(x, float) else str(x) for x in values)
    if values is value:
      shown = getattr(settings, 'given', {}).get(name, shown)
    must = 'must be'
    if expected.startswith(_EACH) and expected.count('a list') == 1:  # not one of several lists
      expected = expected.removeprefix(_EACH)
      must = 'must each be' if len(values) > 1 else must
    raise ValueError(f'--{name}={shown} {must} {expected}')


def checked(function: _Function) -> _Function:
  """The function, which raises ValueError for an argument as `check` does for a field."""
  signature = inspect.signature(function)
  owner = getattr(function, '__qualname__', '').removesuffix('.__init__')

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    try:
      given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
      return function(*args, **kwargs)  # whose own TypeError names it
    for name, hint in _ranges(function).items():
      if name in given:
        _check(f'{owner}.{name}', given[name], hint)
    return function(*args, **kwargs)

  vars(call)['__signature__'] = signature  # which gin reads
  return typing.cast(_Function, call)


def _check(setting: str, value: Any, hint: Any, *is_open: Callable[[Any], bool]) -> None:
  if expected := mismatch(value, hint, *is_open):
    raise ValueError(f'{setting}={value!r} must be {expected}')


@functools.cache
def _ranges(annotated: Any) -> dict[str, Any]:
  """The annotations of fields or arguments that state a range, by name."""
  hints = typing.get_type_hints(annotated, include_extras=True)
  return {name: hint for name, hint in hints.items() if _states_a_range(hint)}


def _states_a_range(hint: Any) -> bool:
  if typing.get_origin(hint) in (Annotated, Literal):
    return True
  return any(map(_states_a_range, typing.get_args(hint)))


def mismatch(value: Any, hint: Any, is_open: Callable[[Any], bool] = lambda _: False) -> str | None:
  """What a value must be in place of one that its annotation does not allow; None if it fits.

  A value for which `is_open` holds, such as a macro of gin, fits: only the run can tell.
  """
  if is_open(value):
    return None
  origin = typing.get_origin(hint)
  arguments = typing.get_args(hint)

  def first(pairs: Iterable[tuple[Any, Any]]) -> str | None:
    return next(filter(None, (mismatch(*pair, is_open) for pair in pairs)), None)

  if origin is Annotated:
    wrong = mismatch(value, arguments[0], is_open)
    if not isinstance(arguments[1], str):  # another library's
      return wrong
    interval = _INTERVAL.fullmatch(arguments[1])
    if wrong:
      return f'{wrong}, {_words(*interval.groups())}' if interval else wrong
    return _out_of_range(value, arguments[1])
  if origin in (typing.Union, types.UnionType):
    if any(inspect.isclass(x) and issubclass(x, os.PathLike) for x in arguments):
      right = value and isinstance(value, str | os.PathLike)
      return None if right or value is None and types.NoneType in arguments else 'a path'
    expected = dict.fromkeys(mismatch(value, argument, is_open) or '' for argument in arguments)
    return None if '' in expected else ' or '.join(expected)
  if hint in (None, types.NoneType):
    return None if value is None else 'None'
  if hint in _SCALARS:
    kind, what = _SCALARS[hint]
    return None if isinstance(value, kind) and isinstance(value, bool) == (hint is bool) else what
  if origin is Literal:
    words = ', '.join(map(repr, arguments))
    return None if value in arguments else words if len(arguments) == 1 else f'one of {words}'
  if origin is collections.abc.Callable:
    return 'a function: @name' if isinstance(value, _LITERALS) else None
  if origin in (tuple, list, Sequence, Iterable):
    if not isinstance(value, (list, tuple, range)):
      return f'{_A_LIST}(..., ...)'
    is_fixed = origin is tuple and arguments[-1] is not ...
    parts = {mismatch(object(), argument) for argument in arguments} if is_fixed else set()
    part = parts.pop() if len(parts) == 1 else None
    is_scalar = part and _A_LIST not in part
    whole = f'a list of {len(arguments)}' + (f' (each {part})' if is_scalar else '')
    if is_fixed and len(value) != len(arguments):
      return whole
    expected = first(zip(value, arguments if is_fixed else arguments[:1] * len(value), strict=True))
    return expected and (whole if '(' in whole else f'{_EACH}{expected}')
  if origin in (dict, Mapping):
    if not isinstance(value, dict):
      return 'a dict: {...}'
    expected = first((x, arguments[i]) for pair in value.items() for i, x in enumerate(pair))
    return expected and f'a dict, each value {expected}'
  if not inspect.isclass(hint) or getattr(hint, '_is_protocol', False):
    return None
  known = hint.__module__.split('.')[0] in ('het_plugin', 'flax') or issubclass(hint, os.PathLike)
  if known and not isinstance(value, hint):
    return 'a path' if issubclass(hint, os.PathLike) else f'a {hint.__name__}: @...()'
  return None


def _out_of_range(value: Any, allowed: str) -> str | None:
  """What a value must be in place of one that is not allowed; None if it fits.

  Allowed are an interval such as '[0, 1)', `REGEX` or `NOT_EMPTY`.
  """
  if allowed == NOT_EMPTY:
    return None if len(value) else NOT_EMPTY
  if allowed == REGEX:
    try:
      re.compile(value)
    except re.error as error:
      return f'a regular expression: {error}'
    return None
  interval = _INTERVAL.fullmatch(allowed)
  if interval is None:
    return None
  left, low, high, right = interval.groups()
  above = value > float(low) or (left == '[' and value == float(low))
  below = value < float(high) or (right == ']' and value == float(high))
  if above and below and not math.isnan(value):
    return None
  return f'in {allowed}' if above else _words(left, low, high, right)


def _words(left: str, low: str, high: str, right: str) -> str:
  """An interval in words."""
  if float(high) >= 2**31:  # no bound, or that of int32
    return f'at least {low}' if left == '[' else f'above {low}'
  return f'in {left}{low}, {high}{right}'
