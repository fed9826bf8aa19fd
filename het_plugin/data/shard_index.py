"""Examples in shards: an index of where their images and labels are, and sources by that index.

A format (`Format`) says what a file holds. The index is made once, kept in the user's cache, and
made again when a file changes.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin.data import array_source, preprocess, remote, shards
from het_plugin.data.corrections import relabel
from het_plugin.data.sources import TRAIN_SPLIT, ImageTextInfo, TaskInfo
from het_plugin.rows.labels import class_numbers

NAME_FILES = ('classnames.txt', 'classes.txt', 'class_names.txt', 'label.labels.txt')
_VERSION = 3  # of the index
LABEL_BYTES = 2**20  # a larger member is no label
_LABEL_LENGTH = 2**12  # of the text of a label
_SHOWN_FIELDS = 20
_CHECKSUM_ROWS = 2**16  # at once: a copy of the whole index would double its memory
_THREADS = 16  # that look at the files
_BLOCK_RECORDS = 128  # of a file that is read by number
_BLOCK_BYTES = 2**23  # of a shard that are read together, far away or in the order of blocks

Place = tuple[int, int]  # offset and size in a file
_NOWHERE: Place = (0, -1)


@dataclasses.dataclass(frozen=True)
class Format:
  """What a kind of shards holds.

  prefix: before the path, in the name of a task.
  patterns: of the files in a folder, the usual one first.
  images, labels, captions: the usual names of their fields; the first that a sample has is taken.
  samples: reads the samples of a file, each a key and its fields: places, or the text of those
    that may be labels, whose names are given.
  sample: describes a sample, for a file without any.
  read: reads images in a way of its own, given a file and their places.
  """

  prefix: str
  patterns: Sequence[str]
  images: Sequence[str]
  labels: Sequence[str]
  captions: Sequence[str]
  samples: Callable[[shards.File, Sequence[str]], Iterator[tuple[str, Mapping[str, Place | str]]]]
  sample: str
  read: Callable[[shards.File, list[Place]], list[bytes | None]] | None = None


class _Shards:
  """Files and the index of their samples.

  image, text: places of members, int64 [N, 2] of offset and size in the file; size -1 for none.
    `text` takes no memory where captions are not read.
  label_text: the texts that are labels, [U]; '' for none.
  label: the number of each label's text, [N].
  """

  def __init__(self, format: Format, argument: str, uses: tuple[str, ...]):
    self._format = format
    self._reads_captions = 'caption' in uses
    self.name = f'{format.prefix}:{argument}'
    path, self.settings = shards.parse(self.name, argument, uses)
    for use in self.settings.keys() & {'image', 'caption'}:
      self.settings[use] = self.settings[use].lower()  # as fields are
    self.root, self.paths = shards.find(self.name, path, *format.patterns)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      self._stats = list(pool.map(lambda path: path.stat(), self.paths))
    index = self._read_index() or self._make_index()
    self.image = index['image']
    self.text = index.get('text', np.broadcast_to(np.array(_NOWHERE), self.image.shape))
    self.label_text = index['label_text']
    self.label = index['label']
    self._shard = index['shard']
    of_shard = np.array([shards.split_of(path.relative) for path in self.paths])
    names = sorted(set(of_shard.tolist()))
    if names == [TRAIN_SPLIT]:
      self.splits = shards.train_and_validation(index['held_out'])
    else:
      split_of = of_shard[self._shard]
      self.splits = {split: shards.row_numbers(split_of == split) for split in names}

  @property
  def version(self) -> str:
    """Number of samples, and a checksum of the files' names and of the index."""
    names = [path.relative for path in self.paths]
    checksum = zlib.crc32(repr(names).encode())
    for array in (self.image, self.text, self.label_text, self.label):
      for at in range(0, len(array), _CHECKSUM_ROWS):
        checksum = zlib.crc32(array[at : at + _CHECKSUM_ROWS].tobytes(), checksum)
    return f'{len(self.image)} samples {checksum:08x}'

  @property
  def _index_file(self) -> pathlib.Path:
    what = [
      _VERSION,
      self._format.prefix,
      sorted(
        (use, field) for use, field in self.settings.items() if use not in ('names', 'labels')
      ),
      *map(_absolute, self.paths),
    ]
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:32]
    return remote.cache_folder('shards') / f'{digest}.npz'

  def _read_index(self) -> Mapping[str, np.ndarray] | None:
    """The kept index; None if there is none, or the files changed since."""
    try:
      with np.load(self._index_file, allow_pickle=False) as arrays:
        index = dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
      return None
    wanted = {'image', 'label_text', 'label', 'shard', 'held_out'}
    is_whole = index.keys() >= (wanted | {'text'} if self._reads_captions else wanted)
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
      raise ValueError(f'{self.name}: the files hold no samples; {self._format.sample}.')
    if (index['image'][:, 1] < 0).all():
      wanted = self.settings.get('image') or ', '.join(self._format.images)
      raise ValueError(
        f'{self.name}: no sample has an image in the field {wanted}; add ?image=FIELD to the path. '
        f'The fields are {", ".join(fields[:_SHOWN_FIELDS])}.'
      )
    index['label_text'], index['label'] = np.unique(index['label'], return_inverse=True)
    index['label'] = index['label'].astype(np.int32)
    if not self._reads_captions:
      del index['text']
    file = self._index_file
    with contextlib.suppress(OSError):  # without a cache the index is made at each start
      file.parent.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        unfinished = pathlib.Path(folder, file.name)
        np.savez(unfinished, **index)
        os.replace(unfinished, file)
    return index

  def _index_of(self, path: shards.File) -> dict[str, Any]:
    """The samples of one file, in order."""
    image = (self.settings['image'],) if 'image' in self.settings else self._format.images
    caption = (self.settings['caption'],) if 'caption' in self.settings else self._format.captions
    rows = {'image': [], 'text': []}
    keys = []
    labels = []
    found = set()
    stat = path.stat()
    label, in_json = self._label_fields()
    for key, fields in self._format.samples(path, label):
      keys.append(key)
      found |= fields.keys()
      rows['image'].append(self._image_of(path, key, fields, image))
      rows['text'].append(_first(fields, caption) or _NOWHERE)
      labels.append(_label_of(_first(fields, label), in_json, f'{path}: {key}'))
    path.check_unchanged(stat)
    places = {name: np.array(x, np.int64).reshape(-1, 2) for name, x in rows.items()}
    return places | {
      'label': np.array(labels, str),
      'held_out': shards.held_out_keys(keys),
      'fields': found,
    }

  def _image_of(
    self, path: shards.File, key: str, fields: Mapping[str, Place | str], names: Sequence[str]
  ) -> Place:
    found = [field for field in names if isinstance(fields.get(field), tuple)]
    if len(found) > 1:
      raise ValueError(
        f'{self.name}: {key} of {path} has the images {", ".join(found)}; add ?image=FIELD to the '
        'path.'
      )
    return fields[found[0]] if found else _NOWHERE

  def _label_fields(self) -> tuple[Sequence[str], Sequence[str]]:
    """Names of fields, and the path in JSON; a field may have dots."""
    named = self.settings.get('label')
    if named is None:
      return self._format.labels, ()
    field, *in_json = named.split('.')
    if field.lower() == 'json' and in_json:
      return ('json',), in_json
    return (named.lower(),), ()

  def read(self, places: np.ndarray, rows: np.ndarray) -> list[bytes | None]:
    """The content of one member of each row, int64 [B]; None where there is none.

    Raises:
      ValueError: a file is not the one that was indexed.
    """
    found: list[bytes | None] = [None] * len(rows)
    has_member = places[rows, 1] >= 0

    def read_together(some: np.ndarray) -> None:
      shard = self._shard[rows[some[0]]]
      path = self.paths[shard]
      wanted = [tuple(place) for place in places[rows[some]].tolist()]
      try:
        if self._format.read is not None:
          path.check_unchanged(self._stats[shard])
          contents = self._format.read(path, wanted)
        else:
          with path.reader(self._stats[shard]) as read:
            blocks = [self._block(row) for row in rows[some]] if path.is_remote else wanted
            contents = [read(*place, block) for place, block in zip(wanted, blocks, strict=True)]
      except OSError:
        return
      for i, content in zip(some.tolist(), contents, strict=True):
        found[i] = content

    is_remote = self.paths[0].is_remote
    part = self._block_number(rows) if is_remote else self._shard[rows]
    parts = [np.flatnonzero((part == i) & has_member) for i in np.unique(part[has_member])]
    remote.each(read_together, parts, at_once=is_remote)
    return found

  @functools.cached_property
  def _block_starts(self) -> np.ndarray:
    """The first row of each block, and the number of rows."""
    block = self.image[:, 0].clip(self.text[:, 0]) // _BLOCK_BYTES
    if self._format.read is not None:  # places are numbers of records
      block = np.arange(len(self.image)) // _BLOCK_RECORDS
    return shards.block_starts(block + self._shard * (block.max(initial=0) + 1))

  def _block_number(self, rows: np.ndarray | int) -> np.ndarray:
    """The number of the block of each row, from 1."""
    return np.searchsorted(self._block_starts, rows, side='right')

  def _block(self, row: int) -> Place:
    """The place of the images and captions of a row's block."""
    at = int(self._block_number(row))
    block = slice(*self._block_starts[at - 1 : at + 1].tolist())
    places = np.concatenate([self.image[block], self.text[block]])
    places = places[places[:, 1] >= 0]
    first = int(places[:, 0].min())
    return first, int(places.sum(1).max()) - first

  def blocks(self, rows: np.ndarray) -> np.ndarray:
    """Where blocks begin in sorted rows [N], and N."""
    return shards.block_starts(self._block_number(rows))

  def describe(self, row: int) -> str:
    """The file, and the place of the sample in it."""
    i, number = shards.locate(self.file_starts, row)
    return f'{self.paths[i]}[{number}]'

  def file(self, row: int) -> str:
    """The same below what the user named, as in a table of labels."""
    i, number = shards.locate(self.file_starts, row)
    return f'{self.paths[i].relative}[{number}]'

  @functools.cached_property
  def file_starts(self) -> np.ndarray:
    """The first row of each file, and N, int64 [number of files + 1]."""
    return np.searchsorted(self._shard, np.arange(len(self.paths) + 1))


class ShardSource:
  """An ExampleSource of RGB images with class labels.

  A label is a class number or a name, from the usual field of the format or ?label=FIELD. With
  ?label=json.PATH it is a value in a JSON member, or a list of several. The names of numbers are
  the lines of a file beside the shards, classnames.txt or ?names=FILE. ?labels=FILE replaces labels
  (`corrections.relabel`).
  """

  def __init__(self, argument: str, format: Format):
    """Reads or makes the index. ValueError if there are no samples, or a label is wrong."""
    self._shards = _Shards(format, argument, ('image', 'label', 'names', 'labels'))
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
          f'classes, write all names into {self._shards.root}/{NAME_FILES[0]}.'
        )
      names = names or tuple(words)
      of_name = class_numbers(f'{name}: ', names, words)
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
        f'{name}: no sample has a label in the field '
        f'{self._shards.settings.get("label") or " or ".join(format.labels)}; add ?label=FIELD or '
        '?label=json.PATH to the path.'
      )
    # It stands here for one that has a label.
    numbers = np.where(has_label, self._shards.label, self._shards.label[np.argmax(has_label)])
    num_classes, self._labels, _ = array_source.labels_of(
      name, {'label': table[numbers]}, names, len(numbers)
    )
    version = self._shards.version
    if corrected := self._shards.settings.get('labels'):
      of_files = self._shards.paths, self._shards.file_starts
      named, checksum = relabel(corrected, self._labels, *of_files, names, num_classes)
      has_label[named] = True
      version = f'{version} {checksum}'
    self._shards.image[~has_label] = _NOWHERE
    self._splits = shards.labelled(self._shards.splits, has_label)
    self.info = TaskInfo(
      num_classes=num_classes,
      multi_label=width > 1,
      channels=3,
      class_names=names,
      splits={split: len(rows) for split, rows in self._splits.items()},
      max_labels=width,
      version=version,
    )

  def _names(self) -> tuple[str, ...] | None:
    given = self._shards.settings.get('names')
    for name in (given,) if given else NAME_FILES:
      file, content = shards.text_beside(self._shards.root, name)
      if content is not None:
        try:
          names = content.decode('utf-8-sig').rstrip().split('\n')
        except UnicodeDecodeError as error:
          raise ValueError(f'{file} is not text in UTF-8.') from error
        names = tuple(map(str.strip, names))
        if '' in names:
          raise ValueError(f'{file}: line {names.index("") + 1} is empty; it must name a class.')
        return names
    if given:
      raise ValueError(f'{self._shards.name}: there is no file {file}.')
    return None

  @property
  def typical_side(self) -> float:
    """The median of the shorter sides of some images, in pixels."""
    rows = next(iter(self._splits.values()))
    if self.prefers_blocks:  # those of the first block
      rows = rows[: self._shards.blocks(rows)[1]]
    return preprocess.typical_side(rows, functools.partial(self._shards.read, self._shards.image))

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes | None], np.ndarray]:
    rows = self._splits[split][ids]
    return self._shards.read(self._shards.image, rows), self._labels[rows]

  @property
  def prefers_blocks(self) -> bool:
    """Whether the files are far away, and read in blocks."""
    return self._shards.paths[0].is_remote

  def blocks(self, split: str) -> np.ndarray:
    """First numbers of the examples of each block; see ExampleSource."""
    return self._shards.blocks(self._splits[split])

  def describe(self, split: str, example_id: int) -> str:
    return self._shards.describe(int(self._splits[split][example_id]))

  def file(self, split: str, example_id: int) -> str:
    """The name of an example in a table of labels."""
    return self._shards.file(int(self._splits[split][example_id]))


class ShardCaptionSource:
  """An ExampleSource of RGB images with a caption each, from the usual field or ?caption=FIELD."""

  def __init__(self, argument: str, format: Format):
    """Reads or makes the index. ValueError if there are no samples, or no captions."""
    self._shards = _Shards(format, argument, ('image', 'caption'))
    if (self._shards.text[:, 1] < 0).all():
      raise ValueError(
        f'{self._shards.name}: no sample has a caption in the field '
        f'{" or ".join(format.captions)}; add ?caption=FIELD to the '
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

  @property
  def prefers_blocks(self) -> bool:
    """Whether the files are far away, and read in blocks."""
    return self._shards.paths[0].is_remote

  def blocks(self, split: str) -> np.ndarray:
    """First numbers of the examples of each block; see ExampleSource."""
    return self._shards.blocks(self._shards.splits[split])

  def describe(self, split: str, example_id: int) -> str:
    return self._shards.describe(int(self._shards.splits[split][example_id]))


def _absolute(path: shards.File) -> str:
  return str(path) if path.is_remote else os.path.abspath(str(path))


def _first(fields: Mapping[str, Place | str], names: Sequence[str]) -> Place | str | None:
  """The first of some fields that a sample has."""
  return next((fields[name] for name in names if name in fields), None)


def _label_of(found: Place | str | None, in_json: Sequence[str], where: str) -> str:
  """The text of a label: a number, a name, or several as JSON; '' for none."""
  if not isinstance(found, str):  # longer members are no labels
    return ''
  text = found.strip()
  if in_json:
    try:
      value = json.loads(text)
      for name in in_json:
        value = value[name]
    except (ValueError, KeyError, TypeError, RecursionError):
      return ''
    text = label_text(value, f'{where}.{".".join(("json", *in_json))}')
  if len(text) > _LABEL_LENGTH:
    raise ValueError(
      f'{where}: the label has {len(text)} characters; it must be a number, a name, or a list of '
      'these.'
    )
  return text


def label_text(value: Any, where: str) -> str:
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
