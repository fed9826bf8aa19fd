"""Images in a folder, JPEG or PNG, with a file of captions."""

import json
import pathlib
from collections.abc import Iterator

import numpy as np

from het_plugin.data.array_source import VALIDATION_FRACTION, fixed_split
from het_plugin.data.image_folder import read_bytes, table_records
from het_plugin.data.sources import TRAIN_SPLIT, ImageTextInfo

FILE_NAMES = ('captions.jsonl', 'captions.csv', 'captions.tsv')


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
    self._captions, split_of = _images(self._file)
    files = list(self._captions)
    if not files:
      raise ValueError(f'{self._file} holds no records.')
    if None in split_of.values():
      held_out, _ = fixed_split(len(files), VALIDATION_FRACTION)
      split_of = dict.fromkeys(files, TRAIN_SPLIT) | {files[i]: 'validation' for i in held_out}
    splits = sorted(set(split_of.values()))
    self._files = {split: [f for f in files if split_of[f] == split] for split in splits}
    self.info = ImageTextInfo(
      channels=3,
      splits={split: len(files) for split, files in self._files.items()},
      version=f'{len(files)} images, {sum(map(len, self._captions.values()))} captions',
    )

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes | None], list[list[str]]]:
    files = [self._files[split][i] for i in ids]
    images = [read_bytes(self._file.parent / file) for file in files]
    return images, [self._captions[file] for file in files]

  def describe(self, split: str, example_id: int) -> str:
    return str(self._file.parent / self._files[split][example_id])


def _captions_file(path: str) -> pathlib.Path:
  file, where = pathlib.Path(path), f'image_folder_captions:{path}'
  suffixes = [pathlib.Path(name).suffix for name in FILE_NAMES]
  if file.is_dir():
    found = [file / name for name in FILE_NAMES if (file / name).is_file()]
    if len(found) != 1:
      raise ValueError(
        f'{where}: the folder holds {len(found)} of {list(FILE_NAMES)}; it must hold one, or name '
        'the file itself.'
      )
    return found[0]
  if not file.is_file():
    raise ValueError(f'{where}: there is no such folder or file.')
  if file.suffix not in suffixes:
    raise ValueError(f'{where}: a file of captions must end in {suffixes}.')
  return file


def _images(file: pathlib.Path) -> tuple[dict[str, list[str]], dict[str, str | None]]:
  """The captions and the split of each image, by its `file`."""
  records = (
    _json_records(file) if file.suffix == '.jsonl' else table_records(file, ('file', 'caption'))
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
  with file.open(encoding='utf-8') as lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        record = json.loads(line)
      except json.JSONDecodeError as error:
        raise ValueError(f'{file}, line {number} is not valid JSON: {error}.') from error
      if not isinstance(record, dict) or 'caption' not in record:
        raise ValueError(
          f"{file}, line {number}: a record must be an object with 'file' and 'caption'."
        )
      yield number, record
