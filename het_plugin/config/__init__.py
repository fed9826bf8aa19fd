"""The gin configuration of a run.

Importing this package, as our gin files do, registers heads, integrators, backbones and models.
"""

from het_plugin.system import versions

versions.check()
try:
  from het_plugin.config import parsing, registry

  registry.register(*registry.MODEL_ROOMS)
except ImportError as error:  # in a checkout without gin-config, its folder gin/ is what is found
  if (error.name or 'het_plugin').startswith('het_plugin'):
    raise
  raise versions.missing(error) from error

parsing.install_file_reader()
