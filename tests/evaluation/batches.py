"""Batches of examples, as evaluations read them."""

import numpy as np


def in_batches(examples, batch_size, rows=slice(None)):
  """This process's rows of batches; the last example fills up the last batch, masked."""
  n = len(examples['index'])
  for start in range(0, n, batch_size):
    places = np.arange(start, start + batch_size)[rows]
    batch = {name: x[np.minimum(places, n - 1)] for name, x in examples.items()}
    yield batch | {'mask': (places < n).astype(np.float32)}
