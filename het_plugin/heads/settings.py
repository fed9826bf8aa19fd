"""Checks of the settings that heads share."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


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
