"""Limits what the configuration of another person's run may name.

gin imports the modules that a file names, and calls what its values refer to. A config.gin may name
the configurables of this project and those of packages that --allow_imports permits. With gin's
`dynamic_registration` a file can call any function of the modules that it imports, so it needs that
flag. Our own runs have no such line.
"""

import importlib
import sys
import tokenize
from collections.abc import Collection
from typing import Any

from absl import flags

import gin
from gin import config_parser
from het_plugin.config import registry, statements

OURS = 'het_plugin'
_DYNAMIC = '__gin__.dynamic_registration'
_BUILTINS = ('gin.macro', 'gin.constant', 'gin.singleton')
_MAIN = 'het_plugin.training.train'  # called by a main, so that no value needs to


def check(text: str, file: str) -> None:
  """Checks the configuration of a run before gin reads it, and imports the modules that it names.

  Modules that this process has already imported are allowed, because no code runs again.

  Raises:
    ValueError: it names something else or includes a file, is of another program, or is not valid
      gin.
  """
  from het_plugin.data import tasks  # takes time to import

  given = (flags.FLAGS['allow_imports'].value or []) if 'allow_imports' in flags.FLAGS else []
  try:
    found = [statement for _, statement in statements.statements(text)]
  except (SyntaxError, tokenize.TokenError, RecursionError) as error:
    raise ValueError(f'{file} is not valid gin: {error}') from error
  imported = [x.module for x in found if isinstance(x, config_parser.ImportStatement)]
  is_dynamic = _DYNAMIC in imported
  if is_dynamic and '__main__' in imported:
    raise ValueError(
      f'{file} binds functions of the program that wrote it (import __main__), such as those of '
      "t5x.train: evaluate the run there; with gin/t5x/train.gin, t5x's runs open here"
    )
  if is_dynamic and not given:
    packages = dict.fromkeys(x.split('.')[0] for x in imported if x != _DYNAMIC)
    raise ValueError(
      f'{file} has {_DYNAMIC}, with which it can call any function of its modules: '
      f'--allow_imports={",".join(packages)} permits it'
    )
  names = _Names(file, given, is_dynamic)
  for statement in found:  # in gin's order: a later import may give a name another meaning
    if isinstance(statement, config_parser.IncludeStatement):
      raise ValueError(
        f'{file} includes {statement.filename!r}; a config.gin written by a run has no include'
      )
    if isinstance(statement, config_parser.ImportStatement) and statement.module != _DYNAMIC:
      names.add(statement)
    if isinstance(statement, config_parser.BindingStatement):
      if statement.arg_name:
        names.check(statement.selector)
      for reference in statements.inside(statement.value, statements.Reference):
        names.check(reference.name.rpartition('/')[2], in_a_value=True)
      for value in statements.inside(statement.value, str):
        if (namespace := tasks.tfds_namespace(value)) and namespace not in given:
          raise _refusal(f'{file} has the data set {value!r} of', namespace)


def _refusal(what: str, home: str) -> ValueError:
  package = home.split('.')[0]
  return ValueError(f'{what} {home}, which may run any code: --allow_imports={package} permits it')


class _Names:
  """The objects that gin finds under the names of a configuration."""

  def __init__(self, file: str, given: Collection[str], is_dynamic: bool):
    self._file = file
    self._given = given
    self._is_dynamic = is_dynamic
    self._modules = {}  # by the names that the file has for them
    rooms = (*registry.MODEL_ROOMS, *registry.TRAINER_ROOMS)
    self._ours = {gin.get_configurable(name) for name in registry.full_names(*rooms)}
    self._main = gin.get_configurable(_MAIN)

  def add(self, statement: config_parser.ImportStatement) -> None:
    """Imports a module; ValueError if that could run code of a package that is not given."""
    known = not self._is_dynamic and statement.module in sys.modules
    if not known and statement.module.split('.')[0] not in (OURS, *self._given):
      raise _refusal(f'{self._file} imports', statement.module)
    module = importlib.import_module(statement.module)
    name = statement.bound_name()
    self._modules[name] = module if statement.is_from or statement.alias else sys.modules[name]

  def check(self, selector: str, in_a_value: bool = False) -> None:
    """Raises ValueError if the object with this name is neither ours nor of a given package."""
    if selector in _BUILTINS:
      return
    path = self._dynamic(selector) if self._is_dynamic else self._registered(selector)
    if not path:
      return
    configurable = _configurable(path[-1]) if self._is_dynamic else path[-1]
    if in_a_value and configurable is self._main:
      raise ValueError(f'{self._file} refers to {selector}, which only a main calls')
    if configurable in self._ours:
      return
    for found in path:
      home = getattr(found, '__module__', None) or getattr(found, '__name__', 'nothing')
      if home.split('.')[0] not in self._given:
        raise _refusal(f'{self._file} refers to {selector} of', home)

  def _registered(self, selector: str) -> list[Any]:
    try:
      return [gin.get_configurable(selector)]
    except KeyError as error:
      raise ValueError(f'{self._file} refers to {selector}, which is ambiguous') from error
    except ValueError:
      return []  # gin finds none either, and says so

  def _dynamic(self, selector: str) -> list[Any]:
    """The module, and all objects on the way to the one with the name."""
    first, *rest = selector.split('.')
    if first not in self._modules:
      raise ValueError(f'{self._file} refers to {selector}, which it does not import')
    found = [self._modules[first]]
    for name in rest:
      found.append(getattr(found[-1], name, None))
    return found


def _configurable(found: Any) -> Any | None:
  """The configurable of an object that is registered, under any name."""
  try:
    return gin.get_configurable(found)
  except (ValueError, TypeError):
    return None
