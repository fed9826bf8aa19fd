"""Images in tar files as WebDataset writes them, with class labels or captions.

The members of a sample share a key: the path up to the first dot of its last part. What follows is
the field. An image is read by its place in the file. Links in a tar are left out, and nothing is
unpacked.

Reference: https://github.com/webdataset/webdataset
"""

import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence

from het_plugin.data import shard_index, shards

_KEY = re.compile(r'((?:.*/)?[^./][^/.]*)\.([^/]+)')
_END_BYTES = 2**20  # that are looked at behind the last member; a tar ends with zeros


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
  for member, tar in _members(path):
    match = _KEY.fullmatch(member.name)
    if match is None:
      continue
    fields = samples.setdefault(match[1], {})
    field = match[2].lower()
    if field in fields:
      raise ValueError(f'{path}: {match[1]}.{field} is there twice; a key names one sample.')
    fields[field] = (member.offset_data, member.size)
    if field in labels and member.size <= shard_index.LABEL_BYTES:
      fields[field] = tar.extractfile(member).read().decode(errors='replace')
  yield from samples.items()


def _members(path: shards.File) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
  """The regular files of a tar that is not compressed, each with the open tar.

  Raises:
    ValueError: it is no such tar, or is damaged, or ends before the tar does.
  """
  size, _ = path.stat()
  name = 'its first member'
  try:
    with path.open() as file, tarfile.open(fileobj=file, mode='r:') as tar:
      while (member := tar.next()) is not None:
        tar.members.clear()  # which would keep every header
        name = member.name
        if member.offset_data + member.size > size:
          raise ValueError(f'{path} ends within {name}: it was not copied to its end.')
        if member.isreg() and not member.issparse():
          yield member, tar
      # A damaged header ends a tar silently, and so does a second tar behind the first.
      file.seek(tar.offset)
      rest = file.read(_END_BYTES)
  except (tarfile.TarError, EOFError, OSError) as error:
    raise ValueError(f'{path} is not a whole tar file without compression: {error}.') from error
  if len(rest) < tarfile.BLOCKSIZE:
    raise ValueError(f'{path} ends after {name}, without the end of a tar: a part may be missing.')
  if rest.count(0) < len(rest):
    raise ValueError(f'{path}: what follows {name} cannot be read; make the file again.')
