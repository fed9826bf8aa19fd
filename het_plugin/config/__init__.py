"""The gin configuration of a run.

Importing this package, as our gin files do, registers heads, integrators, backbones and models.
"""

from het_plugin.config import parsing, registry

registry.register(*registry.MODEL_ROOMS)
parsing.install_file_reader()
