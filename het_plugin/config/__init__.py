"""The gin configuration of a run.

Importing this package, as our gin files do, registers heads, integrators, backbones and models.
"""

import sys

from het_plugin.system import versions


def _end_a_main(message: str) -> None:
  """Ends a program that was started as `python -m het_plugin.train`; returns in others."""
  main = getattr(sys.modules['__main__'], '__spec__', None)
  if main is not None and main.name.startswith('het_plugin.'):
    print(f'Error: {message}', file=sys.stderr)
    sys.exit(2)


if problem := versions.unsupported():
  _end_a_main(problem)
try:
  from het_plugin.config import parsing, registry

  registry.register(*registry.MODEL_ROOMS)
except ImportError as error:  # in a checkout without gin-config, its folder gin/ is what is found
  if (error.name or 'het_plugin').startswith('het_plugin'):
    raise
  message = f"{error.msg}: pip install 'het_plugin[train]'"
  _end_a_main(message)
  raise ModuleNotFoundError(message, name=error.name) from error

parsing.install_file_reader()
