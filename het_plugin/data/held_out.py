"""Training batches with held-out examples among their rows.

The last of every n rows is held out: row r with r mod n = n - 1. Every device then has the same
share of both on any mesh, and the state of the input is still one integer.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from het_plugin.data import pipeline


@dataclasses.dataclass(frozen=True)
class HeldOutDatasetConfig:
  """Two data sets read as one.

  Both must be endless (augment = True on a slice), and held_out's batch_size divides that of train.
  """

  train: pipeline.DatasetConfig
  held_out: pipeline.DatasetConfig

  def __post_init__(self):
    if self.train.batch_size % self.held_out.batch_size:
      raise ValueError(
        f'HeldOutDatasetConfig.held_out has batch_size {self.held_out.batch_size}; it must divide '
        f'that of train, {self.train.batch_size}.'
      )

  @property
  def batch_size(self) -> int:
    """Rows of the global batch, of both data sets together."""
    return self.train.batch_size + self.held_out.batch_size

  @property
  def held_out_every(self) -> int:
    """n: one of n rows is held out."""
    return self.batch_size // self.held_out.batch_size

  @property
  def mixture_or_task_name(self):
    return self.train.mixture_or_task_name

  @property
  def task_feature_lengths(self) -> Mapping[str, int]:
    return self.train.task_feature_lengths

  @property
  def vocabulary(self) -> str | None:
    return self.train.vocabulary


class HeldOutIterator:
  """Batches of both data sets, with the interface of `pipeline.BatchIterator`.

  `index` counts within each data set, so rows of the two may have the same index.
  """

  def __init__(self, cfg: HeldOutDatasetConfig, rows: np.ndarray):
    """Reads nothing yet; `rows` are the row numbers of the global batch to read, int64 [B].

    Raises:
      ValueError: the data sets do not fit the task, or one ends.
    """
    n = cfg.held_out_every
    group, place = np.divmod(rows, n)
    self._is_held_out = place == n - 1  # [B]
    train_rows = (group * (n - 1) + place)[~self._is_held_out]
    self._both = (
      pipeline.get_dataset(cfg.train, train_rows),
      pipeline.get_dataset(cfg.held_out, group[self._is_held_out]),
    )
    for name, iterator in zip(('train', 'held_out'), self._both, strict=True):
      if iterator.num_examples is not None:
        raise ValueError(
          f'HeldOutDatasetConfig.{name} ends after {iterator.num_examples} examples; it must be '
          'endless: set its augment to True and its num_epochs to None.'
        )
    self._sizes = cfg.train.batch_size, cfg.held_out.batch_size
    self.num_examples = self.num_batches = None
    spec, other = (iterator.element_spec for iterator in self._both)
    self.element_spec = {
      name: jax.ShapeDtypeStruct((cfg.batch_size, *x.shape[1:]), x.dtype)
      for name, x in spec.items()
    }
    if spec.keys() != other.keys():
      raise ValueError(
        'HeldOutDatasetConfig.train mixes images; held-out examples cannot be mixed.'
      )

  @property
  def corrupt_records(self) -> tuple[str, ...]:
    return sum((iterator.corrupt_records for iterator in self._both), ())

  def __iter__(self) -> 'HeldOutIterator':
    return self

  def __next__(self) -> pipeline.Batch:
    train, held_out = map(next, self._both)
    batch = {}
    for name, rows in train.items():
      batch[name] = np.empty((len(self._is_held_out), *rows.shape[1:]), rows.dtype)
      batch[name][~self._is_held_out] = rows
      batch[name][self._is_held_out] = held_out[name]
    return batch

  def get_state(self) -> dict[str, int]:
    """The number of rows before the next batch, of both data sets."""
    return {'position': sum(x.get_state()['position'] for x in self._both)}

  def set_state(self, state: Mapping[str, int]) -> None:
    """Continues at a state of get_state."""
    if set(state) != {'position'} or state['position'] % sum(self._sizes):
      raise ValueError(
        f"state is {dict(state)}; it must be {{'position': p}} with p a multiple of the batch, "
        f'{sum(self._sizes)}.'
      )
    batches = state['position'] // sum(self._sizes)
    for iterator, size in zip(self._both, self._sizes, strict=True):
      iterator.set_state({'position': batches * size})

  def close(self) -> None:
    """Stops the background threads."""
    for iterator in self._both:
      iterator.close()


def get_dataset_with_held_out(
  cfg: pipeline.DatasetConfig | HeldOutDatasetConfig, rows: Sequence[int] | None = None
) -> pipeline.BatchIterator | HeldOutIterator:
  """`pipeline.get_dataset` that also takes a HeldOutDatasetConfig; for `train.get_dataset_fn`."""
  if isinstance(cfg, pipeline.DatasetConfig):
    return pipeline.get_dataset(cfg, rows)
  rows = np.arange(cfg.batch_size) if rows is None else np.asarray(rows, np.int64)
  return HeldOutIterator(cfg, rows)
