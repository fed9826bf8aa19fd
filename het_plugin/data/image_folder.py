"""Images in a folder, JPEG or PNG: a folder per class, or a file of captions."""

import csv
import hashlib
import json
import logging
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin.data import preprocess
from het_plugin.data.annotations import LABEL_FIELDS, with_fields
from het_plugin.data.array_source import VALIDATION_FRACTION, fixed_split
from het_plugin.data.sources import TRAIN_SPLIT, ImageTextInfo, TaskInfo
from het_plugin.rows.files import check_names
from het_plugin.rows.labels import check_weights
from het_plugin.system.terminal import as_typed

_log = logging.getLogger(__name__)

_SPLITS = {'train', 'val', 'valid', 'validation', 'test'}  # usual names
SUFFIXES = ('.jpg', '.jpeg', '.png')
CAPTION_FILES = ('captions.jsonl', 'captions.csv', 'captions.tsv')


class ImageFolderSource:
  """An ExampleSource of RGB images, uint8, in their own sizes.

  The layout is the first one if there is a folder PATH/train, unless it is a class like the others:
    PATH/SPLIT/CLASS/*.jpg   every folder of PATH is a split; train has all classes
    PATH/CLASS/*.jpg         a fixed tenth of every class is 'validation', the rest 'train'
  Class ids follow the sorted folder names. A name of an image that is not a regular file, such as a
  dangling link, is an unreadable image. An optional PATH/labels.csv replaces the labels of the
  files that it names; docs/data.md has its columns.
  """

  def __init__(self, path: str):
    """Lists the files; reads none. ValueError if a folder or the table is not as above."""
    root = pathlib.Path(path)
    if not root.is_dir():
      raise ValueError(f'image_folder:{path}: there is no such folder.')
    folders = _folders(root)
    found = {folder.name for folder in folders}
    # A class may be called 'train', as in CIFAR-100: no folder holds folders then.
    if 'train' in found and (found <= _SPLITS or any(map(_folders, folders))):
      _warn_of_strays(root)
      files = {folder.name: _class_files(folder) for folder in folders}
    else:
      files = _split_by_class(_class_files(root))
    numbers = {name: k for k, name in enumerate(files['train'])}
    for name in map(os.fsencode, numbers):  # a run writes the names of its classes
      if name != name.decode(errors='replace').encode():
        raise ValueError(f'{path}: the class folder {name} is not named in UTF-8: rename it.')
    self._root = root
    self._files: dict[str, list[pathlib.Path]] = {}
    self._labels: dict[str, np.ndarray] = {}
    for split, by_class in files.items():
      unknown = sorted(by_class.keys() - numbers)
      if unknown:
        raise ValueError(f'{root / split} has classes that {root / "train"} lacks: {unknown[:5]}.')
      self._files[split] = [file for several in by_class.values() for file in several]
      counts = [len(several) for several in by_class.values()]
      labels = np.repeat([numbers[name] for name in by_class], counts)
      self._labels[split] = labels.astype(np.int32)[:, None]
    fields, annotators = self._read_table(root / 'labels.csv', numbers)
    checksum = _checksum(numbers)
    for split, paths in self._files.items():
      checksum = _checksum((split, *(path.name for path in paths)), checksum)
      checksum = zlib.crc32(self._labels[split].tobytes(), checksum)
      for path in preprocess.sampled(paths):  # two folders may have exchanged their names
        checksum = zlib.crc32(read_bytes(path) or b'', checksum)
    max_labels = max((x['label'] if fields else x).shape[1] for x in self._labels.values())
    self.info = TaskInfo(
      num_classes=len(numbers),
      multi_label=False,
      channels=3,
      class_names=tuple(numbers),
      splits={split: len(paths) for split, paths in self._files.items()},
      max_labels=max_labels,
      label_fields=fields,
      annotators=annotators,
      version=f'{sum(map(len, self._files.values()))} files {checksum:08x}',
    )

  @property
  def typical_side(self) -> float:
    return typical_side(next(iter(self._files.values())))

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes | None], np.ndarray]:
    files = [self._files[split][i] for i in ids]
    return list(map(read_bytes, files)), self._labels[split][ids]

  def _read_table(
    self, table: pathlib.Path, numbers: Mapping[str, int]
  ) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Takes the labels of a table, if there is one: the additional fields, and the annotators."""
    if not table.is_file():
      return (), None
    votes = _votes(table, numbers)
    every = [vote for several in votes.values() for vote in several]  # with the same columns
    fields = 'label_weight', *(x for x in ('weight', 'annotator') if x in every[0])
    people = sorted({vote['annotator'] for vote in every if 'annotator' in fields})
    number_of = {who: i for i, who in enumerate(people)}
    width = max(map(len, votes.values()))
    for split, files in self._files.items():
      label = np.full((len(files), width), -1, np.int32)
      label[:, 0] = self._labels[split][:, 0]
      label_weight = (label >= 0).astype(np.float32)
      weight = np.ones(len(files), np.float32)
      annotator = np.full((len(files), width), -1, np.int32)
      for i, file in enumerate(files):
        several = votes.pop(str(file.relative_to(table.parent)), ())
        for j, vote in enumerate(several):
          label[i, j] = vote['label']
          label_weight[i, j] = vote.get('label_weight', 1 / len(several))
          weight[i] = vote.get('weight', 1)
          annotator[i, j] = number_of.get(vote.get('annotator'), -1)
      check_weights(f'{table}, split {split}', label_weight, weight, label >= 0)
      given = {'label_weight': label_weight, 'weight': weight, 'annotator': annotator}
      self._labels[split] = with_fields(label, **{name: given[name] for name in fields})
    if votes:
      raise ValueError(f'{table}: there is no image {next(iter(votes))!r}.')
    return fields, tuple(people) or None

  def describe(self, split: str, example_id: int) -> str:
    return str(self._files[split][example_id])

  def file(self, split: str, example_id: int) -> str:
    """The path of an image as in labels.csv."""
    return str(self._files[split][example_id].relative_to(self._root))


class CaptionFileSource:
  """An ExampleSource of RGB images, uint8, in their own sizes, with captions.

  PATH is a folder that holds one of captions.jsonl, captions.csv and captions.tsv, or a file with
  one of these suffixes; docs/data.md has their form. Examples are the images, in the order in which
  the file first names them. An image whose captions are all blank, or whose file is missing, is an
  unreadable record.
  """

  def __init__(self, path: str):
    """Reads the captions; no images. ValueError if there is no such file, or a line is wrong."""
    self._file = _captions_file(path)
    self._captions, split_of = _captions(self._file)
    files = list(self._captions)
    if not files:
      raise ValueError(f'{self._file} holds no records.')
    if None in split_of.values():
      held_out, _ = fixed_split(len(files), VALIDATION_FRACTION)
      split_of = dict.fromkeys(files, TRAIN_SPLIT) | {files[i]: 'validation' for i in held_out}
    checksum = 0
    for file, texts in self._captions.items():
      checksum = _checksum((split_of[file], file, *texts), checksum)
    number = f'{len(files)} images, {sum(map(len, self._captions.values()))} captions'
    splits = sorted(set(split_of.values()))
    self._files = {split: [f for f in files if split_of[f] == split] for split in splits}
    self.info = ImageTextInfo(
      channels=3,
      splits={split: len(files) for split, files in self._files.items()},
      version=f'{number} {checksum:08x}',
    )

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes | None], list[list[str]]]:
    files = [self._files[split][i] for i in ids]
    images = [read_bytes(self._file.parent / file) for file in files]
    return images, [self._captions[file] for file in files]

  def describe(self, split: str, example_id: int) -> str:
    return str(self._file.parent / self._files[split][example_id])


def _checksum(texts: Iterable[str], checksum: int = 0) -> int:
  """CRC-32 of names and other texts, after others of this checksum."""
  return zlib.crc32('\0'.join([*texts, '']).encode(errors='surrogatepass'), checksum)


def _votes(table: pathlib.Path, numbers: Mapping[str, int]) -> dict[str, list[dict[str, Any]]]:
  """The label, as a number, and the other fields of each record of labels.csv, by file."""
  found: dict[str, list[dict[str, Any]]] = {}
  for line, record in table_records(table, ('file', 'label'), LABEL_FIELDS):
    where = f'{table}, line {line}'
    vote = {'label': numbers.get(record['label'])}
    if vote['label'] is None:
      raise ValueError(f'{where}: label {record["label"]!r} is not a class folder.')
    try:
      vote |= {c: float(record[c]) for c in ('label_weight', 'weight') if c in record}
    except (TypeError, ValueError) as error:
      raise ValueError(f'{where}: a weight is not a number.') from error
    votes = found.setdefault(os.path.normpath(str(record['file'])), [])  # ./a.png is a.png
    if votes and vote.get('weight') != votes[0].get('weight'):
      raise ValueError(
        f'{where}: weight is {record["weight"]}; {record["file"]} had {votes[0]["weight"]:g} '
        'before, and an image has one weight.'
      )
    if 'annotator' in record:
      vote['annotator'] = who = record['annotator']
      if not (who or '').strip():
        raise ValueError(f'{where}: the vote has no annotator.')
      if any(who == other['annotator'] for other in votes):
        raise ValueError(f'{where}: {who!r} has voted for this file before.')
    votes.append(vote)
  if not found:
    raise ValueError(f'{table} holds no records.')
  return found


def typical_side(files: Sequence[pathlib.Path]) -> float:
  """`preprocess.typical_side` of files."""
  return preprocess.typical_side(files, lambda some: map(read_bytes, some))


def read_bytes(path: str | os.PathLike) -> bytes | None:
  """The content of a regular file; None if it cannot be read."""
  try:
    if not os.path.isfile(path):  # opening a named pipe would wait
      return None
    with open(path, 'rb') as file:
      return file.read()
  except OSError:
    return None


def table_records(
  file: pathlib.Path, needed: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[int, dict[str, str | None]]]:
  """Line number and fields of each record of a .csv or .tsv file whose first line names columns.

  It must name those that are `needed`, and may name `optional` ones.
  """
  delimiter = '\t' if file.suffix == '.tsv' else ','
  try:
    with file.open(encoding='utf-8-sig', newline='') as lines:
      table = csv.DictReader(lines, delimiter=delimiter, strict=True)
      names = table.fieldnames or []
      missing = [name for name in needed if name not in names]
      if missing:
        raise ValueError(f'{file} lacks the columns {missing}; its first line names {names}.')
      if any(name and names.count(name) > 1 for name in names):
        raise ValueError(f'{file} names a column twice: {names}; several texts need several lines.')
      check_names(str(file), [name for name in names if name], optional)
      for record in table:
        if None in record:
          raise ValueError(
            f'{file}, line {table.line_num} has more fields than the first line names; quote texts '
            f'that hold a {delimiter!r}.'
          )
        names = (name for name in ('file', 'label') if record.get(name))  # of `write_csv`
        yield table.line_num, record | {name: as_typed(record[name]) for name in names}
  except UnicodeDecodeError as error:
    raise ValueError(f'{file} is not valid UTF-8: {error}.') from error
  except csv.Error as error:
    raise ValueError(
      f'{file}, line {table.reader.line_num} is not valid: {error}. A text that begins with a '
      'quotation mark must be quoted, with its own marks written twice.'
    ) from error


def _folders(root: pathlib.Path) -> list[pathlib.Path]:
  return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith('.'))


def _class_files(root: pathlib.Path) -> dict[str, list[pathlib.Path]]:
  """The sorted image files of each class folder below `root`."""
  files = {folder: [] for folder in _folders(root)}
  if not files:
    raise ValueError(f'{root} holds no class folders; it must hold one folder of images per class.')
  _warn_of_strays(root)
  for path in image_files([path for folder in files for path in folder.iterdir()]):
    files[path.parent].append(path)
  for folder, paths in files.items():
    if not paths:
      hint = "; of folders of splits, one must be named 'train'" if _folders(folder) else ''
      raise ValueError(
        f'{folder} holds no images; a class needs files that end in {" or ".join(SUFFIXES)}{hint}.'
      )
  return {folder.name: paths for folder, paths in files.items()}


def image_files(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
  """The sorted images among paths, by their names; warns of others that are not hidden."""
  named = [path for path in paths if path.suffix.lower() in SUFFIXES]
  others = [path for path in paths if path.suffix.lower() not in SUFFIXES]
  if others := [path for path in others if not path.name.startswith('.')]:
    _log.warning(
      '%d files and folders do not end in %s and are left out, such as %s.',
      len(others),
      SUFFIXES,
      min(others),
    )
  return sorted(path for path in named if not path.name.startswith('.'))


def _warn_of_strays(root: pathlib.Path) -> None:
  """Warns of images beside the folders that should hold them."""
  strays = [path for path in root.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()]
  if strays:
    _log.warning(
      '%d images are in no class folder and are left out, such as %s.', len(strays), min(strays)
    )


def _split_by_class(files: dict[str, list[pathlib.Path]]) -> dict[str, dict]:
  """Holds out a tenth of each class, and at least one file if the class has two.

  These are the files whose names have the smallest hashes, so that a file that is added or removed
  moves one other at most.
  """
  splits = {'train': {}, 'validation': {}}
  for name, paths in files.items():
    num_held_out = max(round(VALIDATION_FRACTION * len(paths)), int(len(paths) > 1))
    by_hash = sorted(paths, key=lambda path: hashlib.sha256(os.fsencode(path.name)).digest())
    splits['validation'][name] = sorted(by_hash[:num_held_out])
    splits['train'][name] = sorted(by_hash[num_held_out:])
  return splits


def _captions_file(path: str) -> pathlib.Path:
  file = pathlib.Path(path)
  where = f'image_folder_captions:{path}'
  suffixes = [pathlib.Path(name).suffix for name in CAPTION_FILES]
  if file.is_dir():
    found = [file / name for name in CAPTION_FILES if (file / name).is_file()]
    if len(found) != 1:
      raise ValueError(
        f'{where}: the folder holds {len(found)} of {list(CAPTION_FILES)}; it must hold one, or '
        'name the file itself.'
      )
    return found[0]
  if not file.is_file():
    raise ValueError(f'{where}: there is no such folder or file.')
  if file.suffix not in suffixes:
    raise ValueError(f'{where}: a file of captions must end in {suffixes}.')
  return file


def _captions(file: pathlib.Path) -> tuple[dict[str, list[str]], dict[str, str | None]]:
  """The captions and the split of each image, by its `file`."""
  records = (
    _json_records(file)
    if file.suffix == '.jsonl'
    else table_records(file, ('file', 'caption'), ('split',))
  )
  captions: dict[str, list[str]] = {}
  splits: dict[str, str | None] = {}
  try:
    for line, record in records:
      where = f'{file}, line {line}'
      name, texts, split = (record.get(field) for field in ('file', 'caption', 'split'))
      texts = [] if texts is None else [texts] if isinstance(texts, str) else texts
      if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: 'file' is {name!r}; it must be the path of an image.")
      if os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir:
        raise ValueError(f"{where}: 'file' is {name!r}; it must be a path below {file.parent}.")
      if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: 'caption' is {texts!r}; it must be a text or a list of texts.")
      if split is not None and (not isinstance(split, str) or not split):
        raise ValueError(f"{where}: 'split' is {split!r}; it must be the name of a split.")
      if splits.setdefault(name, split) != split:
        raise ValueError(
          f"{where}: 'split' is {split!r}; {name} was in {splits[name]!r} before, and an image is "
          f'in one split.'
        )
      captions.setdefault(name, []).extend(texts)
  except UnicodeDecodeError as error:
    raise ValueError(f'{file} is not valid UTF-8: {error}.') from error
  without = [name for name, split in splits.items() if split is None]
  if without and len(without) < len(splits):
    raise ValueError(f"{file}: {without[0]} has no 'split', others have; all must, or none.")
  return captions, splits


def _json_records(file: pathlib.Path) -> Iterator[tuple[int, dict]]:
  """(line number, record)"""
  seen = set()
  with file.open('rb') as lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        record = json.loads(line.decode('utf-8-sig'))  # with a mark of Windows
      except (ValueError, RecursionError) as error:
        raise ValueError(f'{file}, line {number} is not valid JSON: {error}.') from error
      if not isinstance(record, dict) or 'caption' not in record:
        raise ValueError(
          f"{file}, line {number}: a record must be an object with 'file' and 'caption'."
        )
      if not record.keys() <= seen:
        check_names(f'{file}, line {number}', record, ('split',))
        seen |= record.keys()
      yield number, record
