"""The gin configuration of a run.

Importing this package, as our gin files do, registers heads, integrators, backbones and models.
"""

import sys

try:
  from het_plugin.config import parsing, registry

  registry.register(*registry.MODEL_ROOMS)
except ImportError as error:  # in a checkout without gin-config, its folder gin/ is what is found
  if (error.name or 'het_plugin').startswith('het_plugin'):
    raise
  message = f"{error.msg}: pip install 'het_plugin[train]'"
  main = getattr(sys.modules['__main__'], '__spec__', None)
  if main is not None and main.name.startswith('het_plugin.'):  # python -m het_plugin.train
    print(f'Error: {message}', file=sys.stderr)
    sys.exit(2)
  raise ModuleNotFoundError(message, name=error.name) from error

parsing.install_file_reader()
