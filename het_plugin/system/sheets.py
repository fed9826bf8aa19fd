"""Images of any aspect in arrays of one shape (SigLIP 2 "NaFlex", Tschannen et al. 2025,
https://arxiv.org/abs/2502.14786, section 2.4.2).

A sheet is a square image of (n + 1)^2 patches. It has up to n^2 patches of a picture, row by row of
the picture, and then empty ones. The last four pixels of its last row, in the first channel, are
the rows and the columns of the picture in patches, each as two bytes, the higher one first.

Arrays are of numpy or of JAX.
"""

import math
from typing import Any


def side_of(max_patches: int, patch_size: int) -> int:
  """The side in pixels of sheets of so many patches.

  >>> side_of(256, 16)  # 17 patches
  272
  """
  return (math.isqrt(max_patches - 1) + 2) * patch_size


def grid_of(sheet: Any) -> Any:
  """Rows and columns of the pictures, int32 [B, 2], of sheets float32 [B, H, H, C] in [-1, 1]."""
  levels = ((sheet[:, -1, -4:, 0] + 1) * 127.5).round().astype('int32')  # [B, 4]
  return levels[:, ::2] * 256 + levels[:, 1::2]


def is_sheet(image: Any, num_patches: int) -> Any:
  """Whether images float32 [B, H, H, C] are sheets of up to N patches, bool [B].

  Rows of -1, which fill up a batch, are sheets without a patch.
  """
  grid = grid_of(image)
  fits = (grid.max(axis=1) <= num_patches) & (grid.prod(axis=1) <= num_patches)
  return fits & ((grid.min(axis=1) >= 1) | (image == -1).all(axis=(1, 2, 3)))
