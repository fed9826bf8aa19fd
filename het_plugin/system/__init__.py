"""The ground floor: what every room may import; some of its modules need jax, orbax and etils."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from het_plugin.system import exit_codes, processes
