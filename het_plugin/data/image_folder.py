"""Images in a folder per class, JPEG or PNG."""

import logging
import os
import pathlib

import numpy as np

from het_plugin.data import counter_random
from het_plugin.data.array_source import SPLIT_KEY, VALIDATION_FRACTION
from het_plugin.data.sources import TaskInfo

_SUFFIXES = ('.jpg', '.jpeg', '.png')


class ImageFolderSource:
  """An ExampleSource of RGB images, uint8, in their own sizes.

  Layouts, told apart by whether there is a folder PATH/train:
    PATH/SPLIT/CLASS/*.jpg   every folder of PATH is a split; the classes are those of train
    PATH/CLASS/*.jpg         a fixed tenth of every class is 'validation', the rest 'train'
  Class ids follow the sorted folder names. What has the name of an image and is no regular file,
  such as a dangling link, is skipped and counted in the log.
  """

  def __init__(self, path: str):
    """Lists the files; reads none.

    Raises:
      ValueError: the folder does not exist, a class has no images, or a split has classes that
        train lacks.
    """
    root = pathlib.Path(path)
    if not root.is_dir():
      raise ValueError(f'image_folder:{path}: there is no such folder.')
    self._root = root
    if (root / 'train').is_dir():
      files = {folder.name: _class_files(folder) for folder in _folders(root)}
    else:
      files = _split_by_class(_class_files(root))
    names = tuple(files['train'])
    self._files: dict[str, list[pathlib.Path]] = {}
    self._labels: dict[str, np.ndarray] = {}
    for split, by_class in files.items():
      unknown = sorted(set(by_class) - set(names))
      if unknown:
        raise ValueError(f'{root / split} has classes that {root / "train"} lacks: {unknown[:5]}.')
      pairs = [(file, names.index(name)) for name, fs in by_class.items() for file in fs]
      self._files[split] = [file for file, _ in pairs]
      self._labels[split] = np.array([label for _, label in pairs], np.int32)
    self.info = TaskInfo(
      num_classes=len(names),
      multi_label=False,
      channels=3,
      class_names=names,
      splits={split: len(paths) for split, paths in self._files.items()},
      version=f'{sum(map(len, self._files.values()))} files',
    )

  def read(
    self, split: str, ids: np.ndarray, size: int, seed: int
  ) -> tuple[list[bytes | None], np.ndarray]:
    files = [self._files[split][i] for i in ids]
    return list(map(read_bytes, files)), self._labels[split][ids][:, None]

  def describe(self, split: str, example_id: int) -> str:
    return str(self._files[split][example_id])


def read_bytes(path: str | os.PathLike) -> bytes | None:
  """The content of a regular file; None if it cannot be read."""
  try:
    if not os.path.isfile(path):  # opening a named pipe would wait
      return None
    with open(path, 'rb') as file:
      return file.read()
  except OSError:
    return None


def _folders(root: pathlib.Path) -> list[pathlib.Path]:
  return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith('.'))


def _class_files(root: pathlib.Path) -> dict[str, list[pathlib.Path]]:
  """The sorted image files of each class folder below `root`."""
  files, skipped = {}, []
  for folder in _folders(root):
    with os.scandir(folder) as entries:
      named = [entry for entry in entries if entry.name.lower().endswith(_SUFFIXES)]
    # The first question needs no look at the file, unless it is a link.
    regular = [e for e in named if e.is_file(follow_symlinks=False) or os.path.isfile(e.path)]
    files[folder.name] = sorted(pathlib.Path(entry.path) for entry in regular)
    skipped += sorted(entry.path for entry in named if entry not in regular)
    if not files[folder.name]:
      raise ValueError(f'{folder} holds no images; a class needs files that end in {_SUFFIXES}.')
  if not files:
    raise ValueError(f'{root} holds no class folders; it must hold one folder of images per class.')
  if skipped:
    logging.getLogger(__name__).warning(
      '%d names of images below %s are no regular files and are skipped, the first is %s.',
      *(len(skipped), root, skipped[0]),
    )
  return files


def _split_by_class(files: dict[str, list[pathlib.Path]]) -> dict[str, dict]:
  """Holds out a fixed tenth of each class, and at least one file if the class has two."""
  splits = {'train': {}, 'validation': {}}
  for number, (name, paths) in enumerate(files.items()):
    num_held_out = max(round(VALIDATION_FRACTION * len(paths)), int(len(paths) > 1))
    order = counter_random.permutation(counter_random.fold(SPLIT_KEY, number), len(paths))
    splits['validation'][name] = [paths[i] for i in np.sort(order[:num_held_out])]
    splits['train'][name] = [paths[i] for i in np.sort(order[num_held_out:])]
  return splits
