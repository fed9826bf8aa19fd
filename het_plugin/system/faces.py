"""The face of a room: names and modules that are imported when they are first used."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def on_first_use(
  package: str, modules: Mapping[str, Sequence[str]] | None = None
) -> Callable[[str], Any]:
  """`__getattr__` of a package (PEP 562), so that `import package` brings nothing else.

  Args:
    package: its full name.
    modules: {module: names that the package has from it}. Modules themselves need no entry.
  """
  module_of = {name: module for module, names in (modules or {}).items() for name in names}

  def found(name: str) -> Any:
    if name in module_of:
      return getattr(importlib.import_module(f'{package}.{module_of[name]}'), name)
    try:
      return importlib.import_module(f'{package}.{name}')
    except ModuleNotFoundError as error:
      if error.name != f'{package}.{name}':
        raise
    raise AttributeError(f'module {package!r} has no attribute {name!r}')

  return found
