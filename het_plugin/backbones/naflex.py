"""Positions of the patches of images of any aspect, "NaFlex" (`system.sheets`).

B images, N = n^2 patches, G side of the grid of the learned positions, D width.
"""

from typing import Literal

import jax
import jax.numpy as jnp

# How the library of a tower resamples its positions; names of PyTorch's filters.
Resampling = Literal['bilinear', 'bilinear_antialias', 'bicubic_antialias']


def positions(
  table: jax.Array, grid: jax.Array, num_patches: int, resampling: Resampling, square: bool
) -> jax.Array:
  """Learned positions [G, G, D], resampled to the grid of each picture, [B, N, D].

  `grid` is int32 [B, 2]. Corners are not aligned. With `square` the table is resampled to a square
  as large as the longer side. The picture takes its first rows and columns. Empty patches have the
  position of the picture's last patch.
  """
  sides = jnp.maximum(grid, 1)
  columns = sides[:, 1:]
  place = jnp.minimum(jnp.arange(num_patches), sides.prod(axis=1, keepdims=True) - 1)  # [B, N]
  if square:
    sides = jnp.broadcast_to(sides.max(axis=1, keepdims=True), grid.shape)
  stored = table.shape[0]
  row = _weights(place // columns, sides[:, :1], stored, resampling)  # [B, N, G]
  column = _weights(place % columns, sides[:, 1:], stored, resampling)
  weights = row[..., :, None] * column[..., None, :]  # [B, N, G, G]
  return jnp.einsum('bngh,ghd->bnd', weights, table)


def _weights(place: jax.Array, side: jax.Array, stored: int, resampling: Resampling) -> jax.Array:
  """Weights [B, N, G] of the `stored` = G places at each place [B, N] of `side` [B, 1] places."""
  scale = stored / side.astype(jnp.float32)
  centre = (place + 0.5) * scale - 0.5  # [B, N]
  if resampling == 'bilinear':
    centre = centre.clip(0, stored - 1)
    width = jnp.ones_like(scale)
  else:
    width = jnp.maximum(scale, 1)
  x = jnp.abs(jnp.arange(stored) - centre[..., None]) / width[..., None]  # [B, N, G]
  if resampling == 'bicubic_antialias':  # Keys (1981), a = -0.5
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weight = jnp.where(x < 1, near, jnp.where(x < 2, far, 0))
  else:
    weight = jnp.maximum(1 - x, 0)
  return weight / weight.sum(axis=-1, keepdims=True)
