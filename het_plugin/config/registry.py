"""Registers what gin may configure, and knows what of it does not change the results of a run.

Each room states its configurables as data, `CONFIGURABLES` in its `__init__.py`:

    CONFIGURABLES = {'classifiers': ('Det', 'Het'), 'temperature': ('FixedTemperature',)}

A key is a module of the room, or the full name of a module elsewhere. `SAME_RESULTS`, where a room
has it, lists parameters as 'NAME.PARAMETER', or '*.PARAMETER' for all configurables of the room.
The code of a room does not import gin.

Importing `het_plugin.config`, as our gin files do, registers the rooms that any host needs. A main
registers the rooms of the trainer, which have the names that t5x gives its own trainer; gin/t5x
registers `t5x_host` in their place.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence

import gin
from het_plugin.config import screen

MODEL_ROOMS = ('integrate', 'heads', 'backbones', 'models')
TRAINER_ROOMS = ('data', 'training', 'evaluation')

_registered = set()


def register(*rooms: str) -> None:
  """Registers the configurables of rooms, each once, as het_plugin.ROOM.NAME."""
  with screen.without_native_lines():  # TensorFlow comes with some rooms
    for room in rooms:
      package = f'het_plugin.{room}'
      register_table(package, importlib.import_module(package).CONFIGURABLES)


def register_table(package: str, table: Mapping[str, Sequence[str]]) -> None:
  """Registers a table of configurables, each once.

  Args:
    package: full name of the room that states the table.
    table: {module: names}, where a module is one of the room, or else a full name. gin knows an
      object of ours by its room, and any other by its module.
  """
  for key, names in table.items():
    in_room = '.' not in key and importlib.util.find_spec(f'{package}.{key}')
    path = f'{package}.{key}' if in_room else key
    module = importlib.import_module(path)
    prefix = path.rpartition('.')[0] if path.startswith('het_plugin.') else path
    for name in names:
      if (prefix, name) not in _registered:
        gin.external_configurable(getattr(module, name), name, module=prefix)
        _registered.add((prefix, name))


def register_trainer() -> None:
  """Registers the built-in trainer, its data sets and the actions of evaluation."""
  register(*TRAINER_ROOMS)


def same_results() -> frozenset[tuple[str, str]]:
  """(configurable, parameter) of all that the rooms state not to change the results of a run."""
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
