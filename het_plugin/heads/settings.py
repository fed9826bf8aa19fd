"""Checks of the settings that heads share."""

import numbers

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def check_sizes(owner: str, or_none: str = '', **sizes: int | None) -> None:
  """Raises ValueError if a size is no whole number of at least 1. None is allowed if `or_none`
  says what it means; `owner` is the head named in the error.
  """
  for name, size in sizes.items():
    is_left_out = size is None and or_none
    if not is_left_out and not (isinstance(size, numbers.Integral) and size >= 1):
      raise ValueError(f'{owner}.{name}={size!r} must be a whole number, at least 1{or_none}')


def check_dtype(owner: str, dtype: DTypeLike) -> None:
  """Raises ValueError if it is no floating type, or one that JAX would narrow."""
  try:
    is_floating = jnp.issubdtype(dtype, jnp.floating)
  except TypeError:  # numpy does not know the name
    is_floating = False
  if not is_floating:
    raise ValueError(
      f"{owner}.dtype={dtype!r} must be a floating type such as 'float32' or 'bfloat16'"
    )
  if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
    raise ValueError(
      f'{owner}.dtype={dtype!r} would be float32, because jax_enable_x64 is off: take '
      "'float32', or set JAX_ENABLE_X64=1"
    )
