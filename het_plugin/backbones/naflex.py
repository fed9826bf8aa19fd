"""Images of any aspect in arrays of one shape (SigLIP 2 "NaFlex", Tschannen et al. 2025,
https://arxiv.org/abs/2502.14786, section 2.4.2).

A sheet is a square image of (n + 1)^2 patches. It has up to n^2 patches of a picture, row by row of
the picture, and then empty ones. The last four pixels of its last row, in the first channel, are
the rows and the columns of the picture in patches, each as two bytes, the higher one first.
`data.preprocess.ResizeAndCrop(mode='patches')` makes sheets.

B images, N = n^2 patches, G side of the grid of the learned positions, D width.
"""

from typing import Literal

import jax
import jax.numpy as jnp

# How the library of a tower resamples its positions; names of PyTorch's filters.
Resampling = Literal['bilinear', 'bilinear_antialias', 'bicubic_antialias']


def grid_of(sheet: jax.Array) -> jax.Array:
  """Rows and columns of the pictures, int32 [B, 2], of sheets float32 [B, H, H, C] in [-1, 1]."""
  levels = jnp.round((sheet[:, -1, -4:, 0] + 1) * 127.5).astype(jnp.int32)  # [B, 4]
  return levels[:, ::2] * 256 + levels[:, 1::2]


def is_sheet(image: jax.Array, num_patches: int) -> jax.Array:
  """Whether images float32 [B, H, H, C] are sheets of up to N patches, bool [B].

  Rows of -1, which fill up a batch, are sheets without a patch.
  """
  grid = grid_of(image)
  fits = (grid.max(axis=1) <= num_patches) & (grid.prod(axis=1) <= num_patches)
  return fits & ((grid.min(axis=1) >= 1) | (image == -1).all(axis=(1, 2, 3)))


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
