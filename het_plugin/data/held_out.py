"""Training batches with held-out examples among their rows.

The last of every n rows is held out: row r with r mod n = n - 1. Every device then has the same
share of both on any mesh, and the state of the input is still one integer.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from het_plugin.data import pipeline, reader


@dataclasses.dataclass(frozen=True)
class HeldOutDatasetConfig:
  """Two data sets read as one.

  Both must be endless (augment = True on a slice). The batch_size of held_out must divide the
  batch_size of train.
  """

  train: pipeline.DatasetConfig
  held_out: pipeline.DatasetConfig

  def __post_init__(self):
    if self.train.batch_size % self.held_out.batch_size:
      raise ValueError(
        f'HeldOutDatasetConfig.held_out.batch_size={self.held_out.batch_size} must divide the '
        f'batch_size of train, {self.train.batch_size}.'
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


def _read_both(
  readers: Sequence[Callable], n: int, positions: np.ndarray
) -> tuple[pipeline.Batch, dict[Any, str]]:
  """Reads the examples of two readers: of every n positions the last is one of the second."""
  group, place = np.divmod(positions, n)
  is_held_out = place == n - 1
  parts = (~is_held_out, group * (n - 1) + place), (is_held_out, group)
  batch = {}
  unreadable = {}
  for number, (read, (rows, own)) in enumerate(zip(readers, parts, strict=True)):
    examples, names = read(own[rows])
    for name, x in examples.items():
      whole = batch.setdefault(name, np.empty((len(positions), *x.shape[1:]), x.dtype))
      whole[rows] = x
    unreadable |= {(number, record): name for record, name in names.items()}
  return batch, unreadable


def get_dataset_with_held_out(
  cfg: pipeline.DatasetConfig | HeldOutDatasetConfig, rows: Sequence[int] | None = None
) -> pipeline.BatchIterator:
  """`pipeline.get_dataset` that also takes a HeldOutDatasetConfig.

  `index` counts within each data set, so rows of the two may have the same index.

  Raises:
    ValueError: the data sets do not fit the task, or one ends.
  """
  if not isinstance(cfg, HeldOutDatasetConfig):
    return pipeline.get_dataset(cfg, rows)
  both = [pipeline.get_dataset(one) for one in (cfg.train, cfg.held_out)]
  for name, one in zip(('train', 'held_out'), both, strict=True):
    if one.num_examples is not None:
      raise ValueError(
        f'HeldOutDatasetConfig.{name} ends after {one.num_examples} examples; it must be '
        'endless: set its augment to True and its num_epochs to None.'
      )
  spec, other = (one.element_spec for one in both)
  if spec.keys() != other.keys():
    raise ValueError('HeldOutDatasetConfig.train mixes images; held-out examples cannot be mixed.')
  for name, x in spec.items():
    if x.shape[1:] != other[name].shape[1:]:
      raise ValueError(
        f'HeldOutDatasetConfig.held_out has {name} {list(other[name].shape[1:])} and train '
        f'{list(x.shape[1:])}; both must be the same.'
      )
  corrupt = reader.CorruptRecords(
    sum(one.corrupt.num_records for one in both),
    cfg.train.max_corrupt_fraction,
    both[0].corrupt.noun,
  )
  B = cfg.batch_size
  return pipeline.BatchIterator(
    functools.partial(_read_both, [one.read for one in both], cfg.held_out_every),
    corrupt,
    {name: jax.ShapeDtypeStruct((B, *x.shape[1:]), x.dtype) for name, x in spec.items()},
    B,
    np.arange(B) if rows is None else np.asarray(rows, np.int64),
    None,
    cfg.train.num_threads,
    cfg.train.num_workers,
    multiple=cfg.held_out_every,
  )
