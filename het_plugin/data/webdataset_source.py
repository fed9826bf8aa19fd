"""Images in tar files as WebDataset writes them, with class labels or captions.

The members of a sample share a key: the path up to the first dot of its last part. What follows is
the field. An image is read by its place in the file. Links in a tar are left out, and nothing is
unpacked.

Reference: https://github.com/webdataset/webdataset
"""

import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from het_plugin.data import shard_index, shards

_END_BYTES = 2**20  # that are looked at behind the last member; a tar ends with zeros
_TYPE = slice(156, 157)  # of a header
_PREFIX = slice(345, 346)  # the first byte of folders before a long name
_OCTAL = re.compile(rb'[0-7]+')
_NAME_OR_SIZE = re.compile(rb'path|size|GNU|charset')  # what may change these in extended fields


class WebDatasetSource(shard_index.ShardSource):
  """An ExampleSource of images in tars with class labels, from the field `cls`."""

  def __init__(self, argument: str):
    """As `ShardSource`."""
    super().__init__(argument, _format('webdataset'))


class WebDatasetCaptionSource(shard_index.ShardCaptionSource):
  """An ExampleSource of images in tars with captions, from the field `txt`."""

  def __init__(self, argument: str):
    """As `ShardCaptionSource`."""
    super().__init__(argument, _format('webdataset_captions'))


def _format(prefix: str) -> shard_index.Format:
  return shard_index.Format(
    prefix=prefix,
    patterns=('**/*.tar',),
    images=('jpg', 'jpeg', 'png', 'webp'),
    labels=('cls',),
    captions=('txt',),
    samples=_samples,
    sample='the members of one are KEY.jpg, KEY.cls ...',
  )


def _samples(
  path: shards.File, labels: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, shard_index.Place | str]]]:
  """The samples of a tar, in the order of their first members, with the texts of labels."""
  samples: dict[str, dict[str, shard_index.Place | str]] = {}
  for name, offset, size, file in _members(path):
    folder, _, base = name.rpartition('/')
    stem, _, field = base.partition('.')
    if not stem or not field:
      continue
    key = f'{folder}/{stem}' if folder else stem
    fields = samples.setdefault(key, {})
    field = field.lower()
    if field in fields:
      raise ValueError(f'{path}: {key}.{field} is there twice; a key names one sample.')
    fields[field] = (offset, size)
    if field in labels and size <= shard_index.LABEL_BYTES:
      file.seek(offset)
      fields[field] = file.read(size).decode(errors='replace')
  yield from samples.items()


def _members(path: shards.File) -> Iterator[tuple[str, int, int, BinaryIO]]:
  """Name, offset and size of the regular files of a tar without compression, and the open tar.

  Raises:
    ValueError: it is no such tar, or is damaged, or ends before the tar does.
  """
  total, _ = path.stat()
  name = 'its first member'
  end = 0  # of the members so far
  try:
    with path.open() as file, tarfile.open(fileobj=file, mode='r:') as tar:
      while True:
        file.seek(end)
        member = None if tar.pax_headers else _plain_member(file)
        if member is not None:
          name, size = member
          start = file.tell()
          end = start + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
          is_file = True
        else:
          file.seek(end)
          try:
            info = tarfile.TarInfo.fromtarfile(tar)
          except tarfile.HeaderError:  # also at the end
            break
          name, start, size = info.name, info.offset_data, info.size
          end = tar.offset
          is_file = info.isreg() and not info.issparse()
        if start + size > total:
          raise ValueError(f'{path} ends within {name}: it was not copied to its end.')
        if is_file:
          yield name, start, size, file
      # A damaged header ends a tar silently, and so does a second tar behind the first.
      file.seek(end)
      rest = file.read(_END_BYTES)
  except (tarfile.TarError, EOFError, OSError) as error:
    raise ValueError(f'{path} is not a whole tar file without compression: {error}.') from error
  if len(rest) < tarfile.BLOCKSIZE:
    raise ValueError(f'{path} ends after {name}, without the end of a tar: a part may be missing.')
  if rest.count(0) < len(rest):
    raise ValueError(f'{path}: what follows {name} cannot be read; make the file again.')


def _plain_member(file: BinaryIO) -> tuple[str, int] | None:
  """Name and size of a member whose content is next in the file then; None for an unusual header.

  `tarfile`, which reads every header, takes 20 us for one: ten times what this does.
  """
  header = file.read(tarfile.BLOCKSIZE)
  if header[_TYPE] == b'x':  # fields of the next member, such as its time, which webdataset writes
    if (fields := _size(header)) is None:
      return None
    if _NAME_OR_SIZE.search(file.read(-(-fields // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)):
      return None
    header = file.read(tarfile.BLOCKSIZE)
  size = _size(header)
  if size is None or header[_TYPE] != b'0' or header[_PREFIX] != b'\0':
    return None
  return header[:100].partition(b'\0')[0].decode(tarfile.ENCODING, 'surrogateescape'), size


def _size(header: bytes) -> int | None:
  """The size in a header; None if it is not written in octal digits, or the checksum is wrong."""
  size = header[124:135]
  checksum = header[148:154]
  if not (header.startswith(b'ustar', 257) and _OCTAL.fullmatch(size + checksum)):
    return None
  # Adler counts 1 + the sum of the bytes, modulo 65,521; the checksum has itself as 8 spaces.
  total = zlib.adler32(header[:148] + b' ' * 8 + header[156:]) & 0xFFFF
  if header[135] not in b'\0 ' or total != (int(checksum, 8) + 1) % 65521:
    return None
  return int(size, 8)
