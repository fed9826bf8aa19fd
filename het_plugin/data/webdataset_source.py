"""Images in tar files as WebDataset writes them, with class labels or captions.

The members of a sample share a key: the path up to the first dot of its last part. What follows is
the field. An index of the members, with the labels, is made once and kept in the user's cache. An
image is then read by its place in the file. Links in a tar are left out, and nothing is unpacked.

Reference: https://github.com/webdataset/webdataset
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from het_plugin.data import array_source, preprocess, shards
from het_plugin.data.sources import TRAIN_SPLIT, ImageTextInfo, TaskInfo

IMAGE_FIELDS = ('jpg', 'jpeg', 'png', 'webp')
NAME_FILES = ('classnames.txt', 'classes.txt', 'class_names.txt')
_KEY = re.compile(r'((?:.*/)?[^./][^/.]*)\.([^/]+)')
_VERSION = 2  # of the index
_LABEL_BYTES = 2**20  # a larger member is no label
_LABEL_LENGTH = 2**12  # of the text of a label
_SHOWN_FIELDS = 20
_END_BYTES = 2**20  # that are looked at behind the last member; a tar ends with zeros


class _Shards:
  """Tar files and the index of their samples.

  image, text: places of members, int64 [N, 2] of offset and size in the file; size -1 for none.
  label_text: the texts that are labels, [U]; '' for none.
  label: the number of each label's text, [N].
  """

  def __init__(self, prefix: str, argument: str, uses: tuple[str, ...]):
    self.name = f'{prefix}:{argument}'
    path, self.settings = shards.parse(self.name, argument, uses)
    for use in self.settings.keys() & {'image', 'caption'}:
      self.settings[use] = self.settings[use].lower()  # as fields are
    field, *self._in_json = self.settings.get('label', 'cls').split('.')
    self._label_field = field.lower()
    if self._label_field != 'json':  # a field may have dots
      self._label_field = '.'.join((self._label_field, *map(str.lower, self._in_json)))
    self.root, self.paths = shards.find(self.name, path, '.tar')
    self._stats = [shards.stat(path) for path in self.paths]
    index = self._read_index() or self._make_index()
    self.image = index['image']
    self.text = index['text']
    self.label_text = index['label_text']
    self.label = index['label']
    self._shard = index['shard']
    of_shard = np.array([shards.split_of(path, self.root) for path in self.paths])
    names = sorted(set(of_shard.tolist()))
    if names == [TRAIN_SPLIT]:
      self.splits = shards.train_and_validation(index['held_out'])
    else:
      split_of = of_shard[self._shard]
      self.splits = {split: np.flatnonzero(split_of == split) for split in names}

  @property
  def version(self) -> str:
    """Number of samples, and a checksum of the files' names and of the index."""
    names = [path.relative_to(self.root).as_posix() for path in self.paths]
    checksum = zlib.crc32(repr(names).encode())
    for array in (self.image, self.text, self.label_text, self.label):
      checksum = zlib.crc32(array.tobytes(), checksum)
    return f'{len(self.image)} samples {checksum:08x}'

  @property
  def _index_file(self) -> pathlib.Path:
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    what = [_VERSION, sorted(self.settings.items()), *(str(path.absolute()) for path in self.paths)]
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:32]
    return pathlib.Path(cache, 'het_plugin', 'webdataset', f'{digest}.npz')

  def _read_index(self) -> Mapping[str, np.ndarray] | None:
    """The kept index; None if there is none, or the files changed since."""
    try:
      with np.load(self._index_file, allow_pickle=False) as arrays:
        index = dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
      return None
    is_whole = index.keys() >= {'image', 'text', 'label_text', 'label', 'shard', 'held_out'}
    return index if is_whole and np.array_equal(index.get('stats'), self._stats) else None

  def _make_index(self) -> Mapping[str, np.ndarray]:
    from het_plugin.reporting import Progress  # imports jax, which a kept index does not need

    parts = []
    with (
      Progress('index', len(self.paths), unit='shards', first=2.0) as progress,
      concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
    ):
      for part in pool.map(self._index_of, self.paths):
        parts.append(part)
        progress.update(1)
    fields = sorted(set().union(*(part.pop('fields') for part in parts)))
    counts = [len(part['label']) for part in parts]
    index = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    index['shard'] = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
    index['stats'] = np.array(self._stats)
    if not sum(counts):
      raise ValueError(
        f'{self.name}: the files hold no samples; the members of one are KEY.jpg, KEY.cls ...'
      )
    if (index['image'][:, 1] < 0).all():
      wanted = self.settings.get('image') or ', '.join(IMAGE_FIELDS)
      raise ValueError(
        f'{self.name}: no sample has an image in the field {wanted}; add ?image=FIELD to the path. '
        f'The fields are {", ".join(fields[:_SHOWN_FIELDS])}.'
      )
    index['label_text'], index['label'] = np.unique(index['label'], return_inverse=True)
    index['label'] = index['label'].astype(np.int32)
    file = self._index_file
    with contextlib.suppress(OSError):  # without a cache the index is made at each start
      file.parent.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        unfinished = pathlib.Path(folder, file.name)
        np.savez(unfinished, **index)
        os.replace(unfinished, file)
    return index

  def _index_of(self, path: pathlib.Path) -> dict[str, Any]:
    """The samples of one file, in the order of their first members."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    for member in _members(path):
      match = _KEY.fullmatch(member.name)
      if match is None:
        continue
      fields = samples.setdefault(match[1], {})
      field = match[2].lower()
      if field in fields:
        raise ValueError(f'{path}: {match[1]}.{field} is there twice; a key names one sample.')
      fields[field] = (member.offset_data, member.size)
    rows = {'image': [], 'text': []}
    labels = []
    with open(path, 'rb') as file:
      for key, fields in samples.items():
        rows['image'].append(self._image_of(path, key, fields))
        rows['text'].append(fields.get(self.settings.get('caption', 'txt'), (0, -1)))
        labels.append(self._label_of(file, fields.get(self._label_field), f'{path}: {key}'))
    found = {name: np.array(places, np.int64).reshape(-1, 2) for name, places in rows.items()}
    return found | {
      'label': np.array(labels, str),
      'held_out': shards.held_out_keys(samples),
      'fields': set().union(*samples.values()),
    }

  def _image_of(
    self, path: pathlib.Path, key: str, fields: Mapping[str, tuple[int, int]]
  ) -> tuple[int, int]:
    if named := self.settings.get('image'):
      return fields.get(named, (0, -1))
    found = [field for field in IMAGE_FIELDS if field in fields]
    if len(found) > 1:
      raise ValueError(
        f'{self.name}: {key} of {path} has the images {", ".join(found)}; add ?image=FIELD to the '
        'path.'
      )
    return fields[found[0]] if found else (0, -1)

  def _label_of(self, file: Any, place: tuple[int, int] | None, where: str) -> str:
    """The text of a label: a number, a name, or several as JSON; '' for none."""
    if place is None or place[1] > _LABEL_BYTES:
      return ''
    file.seek(place[0])
    text = file.read(place[1]).decode(errors='replace').strip()
    if self._label_field == 'json':
      try:
        value = json.loads(text)
        for name in self._in_json:
          value = value[name]
      except (ValueError, KeyError, TypeError, RecursionError):
        return ''
      text = _label_text(value, f'{where}.{".".join(("json", *self._in_json))}')
    if len(text) > _LABEL_LENGTH:
      raise ValueError(
        f'{where}: the label has {len(text)} characters; it must be a number, a name, or a list of '
        'these.'
      )
    return text

  def read(self, places: np.ndarray, rows: np.ndarray) -> list[bytes | None]:
    """The content of one member of each row, int64 [B]; None where there is none.

    Raises:
      ValueError: a file is not the one that was indexed.
    """
    found: list[bytes | None] = [None] * len(rows)
    for shard in np.unique(self._shard[rows]).tolist():
      path = self.paths[shard]
      try:
        file = open(path, 'rb')
      except OSError:
        continue
      with file:
        shards.check_unchanged(path, self._stats[shard], shards.stat(file.fileno()))
        for i in np.flatnonzero(self._shard[rows] == shard).tolist():
          offset, size = places[rows[i]].tolist()
          if size >= 0:
            found[i] = os.pread(file.fileno(), size, offset)
    return found

  def describe(self, row: int) -> str:
    """The file, and the place of the sample in it."""
    shard = self._shard[row]
    return f'{self.paths[shard]}[{row - int(np.searchsorted(self._shard, shard))}]'


class WebDatasetSource:
  """An ExampleSource of RGB images with class labels.

  A label is a class number or a name, from the field `cls` or ?label=FIELD. With
  ?label=json.PATH it is a value in a JSON member, or a list of several. The names of numbers are
  the lines of a file beside the shards, classnames.txt or ?names=FILE.
  """

  def __init__(self, argument: str):
    """Reads or makes the index. ValueError if there are no samples, or a label is wrong."""
    self._shards = _Shards('webdataset', argument, ('image', 'label', 'names'))
    name = self._shards.name
    names = self._names()
    values = [_values(text) for text in self._shards.label_text.tolist()]
    found = {value for several in values for value in several}
    if not all(isinstance(value, int) for value in found):
      words = sorted(str(value) for value in found)
      if names is None and any(isinstance(value, int) for value in found):
        word = min(value for value in found if isinstance(value, str))
        number = min(value for value in found if isinstance(value, int))
        raise ValueError(
          f'{name}: the label {word!r} is no number, and {number} is one; if both are names of '
          f'classes, write all names into {self._shards.root / NAME_FILES[0]}.'
        )
      names = names or tuple(words)
      of_name = shards.class_numbers(name, names, words)
      values = [[of_name[str(value)] for value in several] for several in values]
    elif wrong := [value for value in found if not -1 <= value < 2**31]:
      raise ValueError(f'{name}: there is the label {wrong[0]}; class numbers are 0 .. K - 1.')
    width = max(max(map(len, values)), 1)
    table = np.array([several + [-1] * (width - len(several)) for several in values], np.int64)
    # Several labels may be none; elsewhere, a sample without a label is an unreadable record.
    several_or_none = (width > 1) & (self._shards.label_text != '')
    has_label = ((table >= 0).any(1) | several_or_none)[self._shards.label]
    if not has_label.any():
      raise ValueError(
        f'{name}: no sample has a label in the field {self._shards.settings.get("label", "cls")}; '
        'add ?label=FIELD or ?label=json.PATH to the path.'
      )
    self._shards.image[~has_label] = (0, -1)
    self._splits = shards.labelled(self._shards.splits, has_label)
    # It stands here for one that has a label.
    numbers = np.where(has_label, self._shards.label, self._shards.label[np.argmax(has_label)])
    num_classes, self._labels, _ = array_source.labels_of(
      name, {'label': table[numbers]}, names, len(numbers)
    )
    self.info = TaskInfo(
      num_classes=num_classes,
      multi_label=width > 1,
      channels=3,
      class_names=names,
      splits={split: len(rows) for split, rows in self._splits.items()},
      max_labels=width,
      version=self._shards.version,
    )

  def _names(self) -> tuple[str, ...] | None:
    given = self._shards.settings.get('names')
    for name in (given,) if given else NAME_FILES:
      file = self._shards.root / name
      if file.is_file():
        try:
          names = file.read_text(encoding='utf-8-sig').rstrip().split('\n')
        except UnicodeDecodeError as error:
          raise ValueError(f'{file} is not text in UTF-8.') from error
        names = tuple(map(str.strip, names))
        if '' in names:
          raise ValueError(f'{file}: line {names.index("") + 1} is empty; it must name a class.')
        return names
    if given:
      raise ValueError(f'{self._shards.name}: there is no file {self._shards.root / given}.')
    return None

  @property
  def typical_side(self) -> float:
    """The median of the shorter sides of some images, in pixels."""
    rows = next(iter(self._splits.values()))
    return preprocess.typical_side(rows, functools.partial(self._shards.read, self._shards.image))

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes | None], np.ndarray]:
    rows = self._splits[split][ids]
    return self._shards.read(self._shards.image, rows), self._labels[rows]

  def describe(self, split: str, example_id: int) -> str:
    return self._shards.describe(int(self._splits[split][example_id]))


class WebDatasetCaptionSource:
  """An ExampleSource of RGB images with a caption each, from the field `txt` or ?caption=FIELD."""

  def __init__(self, argument: str):
    """Reads or makes the index. ValueError if there are no samples, or no captions."""
    self._shards = _Shards('webdataset_captions', argument, ('image', 'caption'))
    if (self._shards.text[:, 1] < 0).all():
      raise ValueError(
        f'{self._shards.name}: no sample has a caption in the field txt; add ?caption=FIELD to the '
        'path.'
      )
    self.info = ImageTextInfo(
      channels=3,
      splits={split: len(rows) for split, rows in self._shards.splits.items()},
      version=self._shards.version,
    )

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes | None], list[list[str]]]:
    rows = self._shards.splits[split][ids]
    texts = self._shards.read(self._shards.text, rows)
    captions = [[(text or b'').decode(errors='surrogateescape')] for text in texts]
    return self._shards.read(self._shards.image, rows), captions

  def describe(self, split: str, example_id: int) -> str:
    return self._shards.describe(int(self._shards.splits[split][example_id]))


def _members(path: pathlib.Path) -> Iterator[tarfile.TarInfo]:
  """The regular files of a tar that is not compressed.

  Raises:
    ValueError: it is no such tar, or is damaged, or ends before the tar does.
  """
  size = path.stat().st_size
  name = 'its first member'
  try:
    with open(path, 'rb') as file, tarfile.open(fileobj=file, mode='r:') as tar:
      while (member := tar.next()) is not None:
        tar.members.clear()  # which would keep every header
        name = member.name
        if member.offset_data + member.size > size:
          raise ValueError(f'{path} ends within {name}: it was not copied to its end.')
        if member.isreg() and not member.issparse():
          yield member
      # A damaged header ends a tar silently, and so does a second tar behind the first.
      file.seek(tar.offset)
      rest = file.read(_END_BYTES)
  except (tarfile.TarError, EOFError, OSError) as error:
    raise ValueError(f'{path} is not a whole tar file without compression: {error}.') from error
  if len(rest) < tarfile.BLOCKSIZE:
    raise ValueError(f'{path} ends after {name}, without the end of a tar: a part may be missing.')
  if rest.count(0) < len(rest):
    raise ValueError(f'{path}: what follows {name} cannot be read; make the file again.')


def _label_text(value: Any, where: str) -> str:
  """The text of a label in JSON: a number, a name, or several as JSON; '' for null."""
  several = value if isinstance(value, list) else [value]
  plain = [int(x) if isinstance(x, bool | float) and x == x // 1 else x for x in several]
  if wrong := [x for x in plain if not isinstance(x, int | str | None)]:
    raise ValueError(
      f'{where} has {str(wrong[0])[:40]}; a label must be a whole number, a name, or a list of '
      'these.'
    )
  plain = [x for x in plain if x is not None]
  return json.dumps(plain) if isinstance(value, list) else str(plain[0]) if plain else ''


def _values(text: str) -> list[int | str]:
  """The numbers or names of a label's text; none for ''."""
  if not text:
    return []
  if text.startswith('['):
    try:
      values = json.loads(text)
    except (ValueError, RecursionError):
      return [text]
    return [x for x in values if isinstance(x, int | str)]
  return [int(text) if re.fullmatch(r'-?[0-9]{1,18}', text) else text]
