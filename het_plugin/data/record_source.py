"""Images in TFRecord and ArrayRecord files of TF Examples, with class labels; without TensorFlow.

The usual fields are those of ImageNet (image/encoded, image/class/label or image/class/text) and of
TensorFlow Datasets (image, label).

Reference: https://www.tensorflow.org/tutorials/load_data/tfrecord
"""

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from het_plugin.data import shard_index, shards

_IMAGES = 'image/encoded', 'image'
_LABELS = 'image/class/label', 'label', 'labels', 'image/class/text'
_BATCH = 256  # records of an ArrayRecord file that are read at a time
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5  # types of a protocol buffer's fields

Feature = list[shard_index.Place] | list[int]


class TfRecordSource(shard_index.ShardSource):
  """An ExampleSource of images in TFRecord files without compression, with class labels."""

  def __init__(self, argument: str):
    """As `ShardSource`."""
    patterns = '**/*tfrecord*', '**/*-of-[0-9]*'
    super().__init__(argument, _format('tfrecord', patterns, samples=_tf_samples))


class ArrayRecordSource(shard_index.ShardSource):
  """An ExampleSource of images in ArrayRecord files of this machine, with class labels."""

  def __init__(self, argument: str):
    """As `ShardSource`; ValueError if the library is not installed."""
    patterns = '**/*array_record*', '**/*arrayrecord*'
    of_library = {'samples': _array_samples, 'read': _read_array}
    super().__init__(argument, _format('array_record', patterns, **of_library))


def _format(prefix: str, patterns: Sequence[str], **of_file: Any) -> shard_index.Format:
  return shard_index.Format(
    prefix=prefix,
    patterns=patterns,
    images=_IMAGES,
    labels=_LABELS,
    captions=(),
    sample='one is a TF Example with the fields image/encoded and image/class/label',
    **of_file,
  )


def _tf_samples(
  path: shards.File, labels: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, shard_index.Place | str]]]:
  """The examples of a TFRecord file; one that is damaged has no fields."""
  size, _ = path.stat()
  number = 0
  with path.open() as file:
    while header := file.read(12):
      start = file.tell()
      length, checksum = struct.unpack('<QI', header.ljust(12, b'\0'))
      if len(header) == 12 and checksum != masked_crc(header[:8]):
        compressed = ': it is compressed' if header[:1] in (b'\x1f', b'x') and not number else ''
        raise ValueError(f'{path}: record {number} is damaged, or this is no TFRecord{compressed}.')
      if len(header) < 12 or start + length + 4 > size:
        raise ValueError(f'{path} ends within record {number}: it was not copied to its end.')
      yield str(number), _fields_of(file.read(length), labels, start)
      file.seek(4, 1)  # the checksum of the content
      number += 1


def _fields_of(
  record: bytes, labels: Sequence[str], start: int
) -> dict[str, shard_index.Place | str]:
  """The fields of an example that may be images or labels, at `start` of a file."""
  try:
    features = parse_example(record)
  except (ValueError, IndexError, struct.error):
    return {}
  fields: dict[str, shard_index.Place | str] = {}
  for name, values in features.items():
    if not values:
      continue
    if name in labels or isinstance(values[0], int):
      several = [x if isinstance(x, int) else _text(record, x) for x in values]
      text = shard_index.label_text(several if len(several) > 1 else several[0], name)
      fields[name] = text
    else:
      first, size = values[0]
      fields[name] = (start + first, size)
  return fields


def _text(record: bytes, place: shard_index.Place) -> str:
  return record[place[0] : sum(place)].decode(errors='replace')


def _array_samples(
  path: shards.File, labels: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, shard_index.Place | str]]]:
  """The examples of an ArrayRecord file, whose images have the number of the record as a place."""
  reader = _array_reader(path)
  try:
    num_records = reader.num_records()
    for first in range(0, num_records, _BATCH):
      numbers = range(first, min(first + _BATCH, num_records))
      for number, record in zip(numbers, reader.read(list(numbers)), strict=True):
        fields = _fields_of(record, labels, 0)
        yield (
          str(number),
          # The name of the image's field is found again when it is read.
          {name: x if isinstance(x, str) else (number, x[0]) for name, x in fields.items()},
        )
  finally:
    reader.close()


def _read_array(path: shards.File, places: list[shard_index.Place]) -> list[bytes | None]:
  """Images of records: a place is the number of a record, and where the image begins in it."""
  if not places:
    return []
  reader = _array_reader(path)
  try:
    records = reader.read([number for number, _ in places])
  finally:
    reader.close()
  return [_value_at(record, start) for record, (_, start) in zip(records, places, strict=True)]


def _value_at(record: bytes, start: int) -> bytes | None:
  """The value of a feature that begins at a place."""
  for values in parse_example(record).values():
    for value in values:
      if isinstance(value, tuple) and value[0] == start:
        return record[start : sum(value)]
  return None


def _array_reader(path: shards.File) -> Any:
  if path.is_remote:
    raise ValueError(f'{path}: array_record: reads files of this machine; tfrecord: reads others.')
  try:
    from array_record.python import array_record_module
  except ImportError as error:
    raise ValueError(
      f'array_record:{path} needs a library: pip install array_record ({error}).'
    ) from error
  try:
    return array_record_module.ArrayRecordReader(str(path))
  except (ValueError, RuntimeError) as error:
    raise ValueError(f'{path} is no ArrayRecord file: {error}') from error


def parse_example(record: bytes) -> dict[str, Feature]:
  """The features of a serialized tf.train.Example, by name: places of bytes, or whole numbers.

  Features of floats are left out.

  Raises:
    ValueError, IndexError, struct.error: it is no such message.
  """
  found: dict[str, Feature] = {}
  for features in _bytes_of(record, (0, len(record)), 1):  # Example.features
    for entry in _bytes_of(record, features, 1):  # an entry of Features.feature
      (name,) = _bytes_of(record, entry, 1)
      for feature in _bytes_of(record, entry, 2):
        for kind, _, value in _message(record, feature):
          if kind == 1:  # Feature.bytes_list
            found[_text(record, name)] = _bytes_of(record, value, 1)
          elif kind == 3:  # Feature.int64_list
            found[_text(record, name)] = _integers(record, value)
  return found


def _bytes_of(record: bytes, message: shard_index.Place, number: int) -> list[shard_index.Place]:
  return [
    value for field, kind, value in _message(record, message) if field == number and kind == _BYTES
  ]


def _integers(record: bytes, message: shard_index.Place) -> list[int]:
  """The values of an Int64List, packed or not."""
  values = []
  for field, kind, value in _message(record, message):
    if field != 1:
      continue
    if kind == _VARINT:
      values.append(value)
      continue
    at, size = value
    stop = at + size
    while at < stop:
      number, at = _varint(record, at)
      values.append(number)
  return [value - 2**64 if value >= 2**63 else value for value in values]


def _message(record: bytes, place: shard_index.Place) -> Iterator[tuple[int, int, Any]]:
  """Number, type and value of each field of a message; a value of bytes is a place."""
  at, size = place
  stop = at + size
  while at < stop:
    tag, at = _varint(record, at)
    kind = tag & 7
    if kind == _VARINT:
      value, at = _varint(record, at)
    elif kind == _BYTES:
      length, at = _varint(record, at)
      value = (at, length)
      at += length
    elif kind in (_FIXED_32, _FIXED_64):
      value = None
      at += 4 if kind == _FIXED_32 else 8
    else:
      raise ValueError(f'type {kind} of a field')
    if at > stop:
      raise ValueError('a field is longer than its message')
    yield tag >> 3, kind, value


def _varint(record: bytes, at: int) -> tuple[int, int]:
  """A number of 7 bits a byte, and where it ends."""
  value = shift = 0
  while True:
    byte = record[at]
    at += 1
    value |= (byte & 127) << shift
    if byte < 128:
      return value, at
    shift += 7


@functools.cache
def _crc_table() -> list[int]:
  """Of CRC-32C, by byte."""
  table = []
  for byte in range(256):
    for _ in range(8):
      byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    table.append(byte)
  return table


def masked_crc(content: bytes) -> int:
  """The checksum of a TFRecord: a CRC-32C that is rotated and moved."""
  table = _crc_table()
  crc = 2**32 - 1
  for byte in content:
    crc = table[(crc ^ byte) & 255] ^ crc >> 8
  crc ^= 2**32 - 1
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 2**32 - 1
