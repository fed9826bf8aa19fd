"""The ground floor: what every room may import; some of its modules need jax, orbax and etils."""

from het_plugin.system import faces

__getattr__ = faces.on_first_use(__name__)
