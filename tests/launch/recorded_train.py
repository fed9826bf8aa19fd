"""het_plugin.train, which also writes down the examples that each process reads for training.

python -m tests.launch.recorded_train FOLDER --gin_file=...

FOLDER/process-0.txt then has a line a batch.
"""

import sys
from pathlib import Path

import jax

from het_plugin import data, distributed, gin_utils, train


class Recorded:
  """A BatchIterator that appends the indices of its rows to a file."""

  def __init__(self, iterator, path):
    self._iterator = iterator
    self._path = path

  def __next__(self):
    batch = next(self._iterator)
    with self._path.open('a') as file:
      file.write(' '.join(map(str, batch['index'])) + '\n')
    return batch

  def __getattr__(self, name):
    return getattr(self._iterator, name)


def record(folder, get_dataset=data.get_dataset):
  """Lets the data sets that shuffle, which is the training one, be recorded."""

  def recorded(cfg, rows):
    iterator = get_dataset(cfg, rows)
    if not cfg.shuffle:
      return iterator
    return Recorded(iterator, folder / f'process-{jax.process_index()}.txt')

  data.get_dataset = recorded


if __name__ == '__main__':
  record(Path(sys.argv.pop(1)))
  gin_utils.define_flags()
  distributed.define_flags()
  gin_utils.run(train.main)
