"""Splits and slices of them, in the notation of TensorFlow Datasets.

    train            the whole split
    train[:2000]     its first 2,000 records; train[2000:] has the others, train[-500:] the last 500
    train[10%:20%]   by percent; a boundary is the closest record, int(round(percent * N / 100))

See https://www.tensorflow.org/datasets/splits; sums of splits, shards and TFDS's other roundings
are not supported.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

_SLICE = re.compile(r'(?P<split>[^\[\]]+)\[(?P<start>[^:\]]*):(?P<stop>[^:\]]*)\]')
_RECORD = re.compile(r'-?\d+(?:_\d+)*')
_PERCENT = re.compile(r'(-?\d+(?:\.\d*)?)%')


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
    raise ValueError(f'split is {split!r}; the splits of {task} are {sorted(splits)}.')
  match = _SLICE.fullmatch(split)
  boundaries = match and [match['start'], match['stop']]
  if not boundaries or not _one_unit(boundaries):
    raise ValueError(
      f"split is {split!r}; a slice is of one split, in records ('{name}[:2000]', "
      f"'{name}[-500:]') or in percent ('{name}[10%:20%]')."
    )
  num_records = splits[name]
  if num_records is None:
    raise ValueError(
      f'split is {split!r}; the split {name!r} of {task} is endless, which has no slices: use '
      f'{name!r}, or a slice of a finite split.'
    )
  start, stop = (
    _boundary(text, default, num_records, f'split is {split!r}; the split {name!r} of {task}')
    for text, default in zip(boundaries, (0, num_records), strict=True)
  )
  if start >= stop:
    raise ValueError(
      f'split is {split!r}, which is empty: it goes from record {start} to before record {stop} '
      f'of the {num_records} that {name!r} of {task} has.'
    )
  return SplitPart(name, start, stop - start)


def _one_unit(boundaries: list[str]) -> bool:
  """Whether there is a boundary, and all boundaries are records or all are percents."""
  given = [text for text in boundaries if text]
  return bool(given) and any(all(map(unit.fullmatch, given)) for unit in (_RECORD, _PERCENT))


def _boundary(text: str, default: int, num_records: int, context: str) -> int:
  """The record number of a boundary; negative boundaries count from the end."""
  if not text:
    return default
  percent = _PERCENT.fullmatch(text)
  if percent and abs(float(percent[1])) > 100:
    raise ValueError(f'{context} can be cut at -100% to 100% only.')
  record = round(float(percent[1]) * num_records / 100.0) if percent else int(text)
  if abs(record) > num_records:
    raise ValueError(
      f'{context} has {num_records} records: boundaries must lie in [-{num_records}, '
      f'{num_records}].'
    )
  return record if record >= 0 else num_records + record
