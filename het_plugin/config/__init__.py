"""The gin configuration of a run.

Importing this package, as our gin files do, registers heads, integrators, backbones and models.
"""

from het_plugin.config import registry as registry
