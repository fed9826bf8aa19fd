"""A file of features, whose labels are those of a noisy linear map."""

from pathlib import Path

import numpy as np


def write_rows(folder: Path, num_rows: int) -> tuple[Path, np.ndarray, np.ndarray]:
  """Writes features float32 [N, 6] and labels of five classes [N]; the file, and both."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(num_rows, 6)).astype(np.float32)
  y = (x @ rng.normal(size=(6, 5)) + rng.gumbel(size=(num_rows, 5))).argmax(axis=1)
  path = folder / 'a.npz'
  np.savez(path, features=x, label=y)
  return path, x, y
