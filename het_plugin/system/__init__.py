"""The ground floor: what every room may import. `ranges` needs Python alone, and the others imports
of jax, orbax and etils."""
