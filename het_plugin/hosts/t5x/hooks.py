"""Imported by gin/t5x/stock.gin: registers our actions and optimizer beside t5x's.

Raises:
  ModuleNotFoundError: t5x or a package that it needs is missing.
"""

from het_plugin.config import registry
from het_plugin.hosts import t5x as host

try:
  import t5x.train  # noqa: F401
except ModuleNotFoundError as error:
  raise ModuleNotFoundError(
    f'{error}: install t5x and its dependencies, as in docs/t5x.md'
  ) from error

registry.register_table(host.__name__, host.HOOKS)
registry.register('evaluation')
