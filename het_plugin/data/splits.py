"""Splits and slices of them, in the notation of TensorFlow Datasets.

    train            the whole split
    train[:2000]     its first 2,000 records; train[2000:] has the others, train[-500:] the last 500
    train[10%:20%]   by percent; a boundary is the closest record

See https://www.tensorflow.org/datasets/splits; sums of splits are not supported.
"""

import dataclasses
from collections.abc import Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class SplitPart:
  """Records of a split from number `start` on; num_records is None if it is endless."""

  split: str
  start: int
  num_records: int | None


class SliceableSplits(Mapping[str, int | None]):
  """Number of examples by split; `in` and [] understand slices, iteration gives whole splits.

  seqio's mixtures and evaluator leave out tasks for which `split in task.splits` is False.
  """

  def __init__(self, splits: Mapping[str, int | None]):
    self._splits = splits

  def __getitem__(self, split: str) -> int | None:
    try:
      return resolve(split, self._splits).num_records
    except ValueError as error:
      raise KeyError(str(error)) from error

  def __iter__(self) -> Iterator[str]:
    return iter(self._splits)

  def __len__(self) -> int:
    return len(self._splits)


def resolve(split: str, splits: Mapping[str, int | None], task: str = 'the task') -> SplitPart:
  """Resolves a split or a slice of one, given the number of records of every split.

  Raises:
    ValueError: the split does not exist, or the slice is of an endless split, malformed, out of
      range or empty.
  """
  if split in splits:
    return SplitPart(split, 0, splits[split])
  name = split.partition('[')[0]
  if name not in splits:
    raise ValueError(
      f'split={split!r} is not a split of {task}; choose from {sorted(splits)} '
      '(EVAL_SPLIT in training, --split of other commands).'
    )
  num_records = splits[name]
  if num_records is None:
    raise ValueError(
      f'split is {split!r}; the split {name!r} of {task} is endless and has no slices: use '
      f'{name!r}, or a slice of a finite split.'
    )
  if 'shard' in split[len(name) :]:
    raise ValueError(
      f'split is {split!r}; slices by shard are not supported: give records or percent.'
    )
  import tensorflow_datasets as tfds  # takes half a second

  info = tfds.core.SplitInfo(name=name, shard_lengths=[num_records], num_bytes=0)
  try:
    (part,) = tfds.core.ReadInstruction.from_spec(split).to_absolute({name: info})
  except ValueError as error:
    raise ValueError(
      f'split is {split!r}; the split {name!r} of {task} has {num_records} records: a slice of it '
      f"is in records ('{name}[:20]', '{name}[-5:]') or in percent ('{name}[10%:20%]')."
    ) from error
  start = part.from_ or 0
  stop = num_records if part.to is None else part.to
  if start >= stop:
    raise ValueError(
      f'split is {split!r}, which is empty: records {start} to {stop} of {name!r} of {task}, which '
      f'has {num_records} records.'
    )
  return SplitPart(name, start, stop - start)
