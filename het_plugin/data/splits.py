"""Splits and slices of them, in the notation of TensorFlow Datasets.

    train            the whole split
    train[:2000]     its first 2,000 records; train[2000:] has the others, train[-500:] the last 500
    train[10%:20%]   by percent; a boundary is the closest record

See https://www.tensorflow.org/datasets/splits; sums of splits are not supported.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

_BOUND = r'-?\d[\d_]*(?:\.\d+)?%|-?\d[\d_]*'
_SLICE = re.compile(rf'\[(?P<start>{_BOUND})?:(?P<stop>{_BOUND})?\]')


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
  try:
    start, stop = _bounds(split[len(name) :], num_records)
  except ValueError as error:
    raise ValueError(
      f'split is {split!r}; the split {name!r} of {task} has {num_records} records: a slice of it '
      f"is in records ('{name}[:20]', '{name}[-5:]') or in percent ('{name}[10%:20%]')."
    ) from error
  if start >= stop:
    raise ValueError(
      f'split is {split!r}, which is empty: records {start} to {stop} of {name!r} of {task}, which '
      f'has {num_records} records.'
    )
  return SplitPart(name, start, stop - start)


def _bounds(bounds: str, num_records: int) -> tuple[int, int]:
  """The first record, and the one after the last, of '[10%:]', for example; or ValueError."""
  match = _SLICE.fullmatch(bounds)
  if match is None or not (match['start'] or match['stop']):
    raise ValueError('not a slice')
  units = {bound[-1] == '%' for bound in match.groups() if bound}
  if len(units) > 1:
    raise ValueError('records and percent')
  found = []
  for bound, default in ((match['start'], 0), (match['stop'], num_records)):
    if not bound:
      found.append(default)
      continue
    value = float(bound.rstrip('%'))
    if abs(value) > (100 if bound.endswith('%') else num_records):
      raise ValueError('beyond the last record')
    record = round(value * num_records / 100) if bound.endswith('%') else int(bound)
    # As in TFDS, a percentage that rounds to -0 is the first record.
    found.append(record + num_records if record < 0 else record)
  return found[0], found[1]
