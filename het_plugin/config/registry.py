"""Registers configurables with gin, and knows which parameters do not change results.

Each room states its configurables as data, `CONFIGURABLES` in its `__init__.py`:

    CONFIGURABLES = {'classifiers': ('Det', 'Het'), 'temperature': ('FixedTemperature',)}

A key is a module of the room, or the full name of another module. The optional `SAME_RESULTS` lists
parameters as 'NAME.PARAMETER', or '*.PARAMETER' for all configurables of the room. The code of a
room does not import gin.

Importing `het_plugin.config`, as our gin files do, registers the rooms that any host needs. A main
also registers the rooms of the trainer, whose names are those of t5x's trainer; gin/t5x registers
`hosts.t5x` instead.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence

import gin
from het_plugin.system import screen

MODEL_ROOMS = ('integrate', 'heads', 'backbones', 'models')
TRAINER_ROOMS = ('data', 'training', 'evaluation')

registered = set()


def register(*rooms: str) -> None:
  """Registers the configurables of rooms, each once, as het_plugin.ROOM.NAME."""
  with screen.without_native_lines():  # some rooms import TensorFlow
    for room in rooms:
      package = f'het_plugin.{room}'
      register_table(package, importlib.import_module(package).CONFIGURABLES)


def register_table(package: str, table: Mapping[str, Sequence[str]]) -> None:
  """Registers the `CONFIGURABLES` of a package, each once.

  In gin, an object of this project has the name of its room, and any other that of its module.
  """
  for path, prefix, name in _entries(package, table):
    if (prefix, name) not in registered:
      gin.external_configurable(getattr(importlib.import_module(path), name), name, module=prefix)
      registered.add((prefix, name))


def _entries(package: str, table: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, str]]:
  """The module, the module in gin and the name of each configurable of a package."""
  for key, names in table.items():
    in_room = '.' not in key and importlib.util.find_spec(f'{package}.{key}')
    path = f'{package}.{key}' if in_room else key
    prefix = path.rpartition('.')[0] if path.startswith('het_plugin.') else path
    for name in names:
      yield path, prefix, name


def full_names(*rooms: str) -> list[str]:
  """The names in gin of the configurables of rooms, which it registers."""
  register(*rooms)
  packages = [f'het_plugin.{room}' for room in rooms]
  return [
    f'{prefix}.{name}'
    for package in packages
    for _, prefix, name in _entries(package, importlib.import_module(package).CONFIGURABLES)
  ]


def register_trainer() -> None:
  """Registers the built-in trainer, its data sets and the actions of evaluation."""
  register(*TRAINER_ROOMS)


def same_results() -> frozenset[tuple[str, str]]:
  """(configurable, parameter) of all parameters that do not change the results of a run."""
  found = set()
  for room in (*MODEL_ROOMS, *TRAINER_ROOMS):
    package = importlib.import_module(f'het_plugin.{room}')
    names = [name for group in package.CONFIGURABLES.values() for name in group]
    for entry in getattr(package, 'SAME_RESULTS', ()):
      name, _, parameter = entry.partition('.')
      found |= {(each, parameter) for each in (names if name == '*' else [name])}
  return frozenset(found)


def is_registered(name: str) -> bool:
  """Whether gin knows a configurable of this name, which may be qualified."""
  try:
    gin.get_configurable(name)
  except ValueError:
    return False
  return True
