"""The face of a room: names and modules that are imported when they are first used."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def on_first_use(package: str) -> tuple[Callable[[str], Any], list[str]]:
  """`__getattr__` of a package (PEP 562), so that `import package` brings nothing else, and its
  `__all__`.

  The package has the names that its source imports under `if TYPE_CHECKING:`, where type checkers
  see them, too. Modules of the package need no line for this, but type checkers see those only
  that have one.
  """
  blocks = ast.parse(inspect.getsource(sys.modules[package])).body
  imports = [node for block in blocks if isinstance(block, ast.If) for node in block.body]
  module_of = {
    alias.name: node.module
    for node in imports
    if isinstance(node, ast.ImportFrom) and node.module and node.module != package
    for alias in node.names
  }

  def found(name: str) -> Any:
    if name in module_of:
      return getattr(importlib.import_module(module_of[name]), name)
    try:
      return importlib.import_module(f'{package}.{name}')
    except ModuleNotFoundError as error:
      if error.name != f'{package}.{name}':
        raise
    message = f'module {package!r} has no attribute {name!r}'
    raise AttributeError(message, name=name, obj=sys.modules[package])

  # Completion, and Python's "did you mean", see the names before their first use.
  vars(sys.modules[package])['__dir__'] = lambda: sorted({*vars(sys.modules[package]), *module_of})
  return found, [*module_of]
