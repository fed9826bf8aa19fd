"""The ground floor: what every room may import; some of its modules need jax, orbax and etils."""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:
  from het_plugin.system import exit_codes, processes

__getattr__, _ = faces.on_first_use(__name__)
