"""The names of the classes that a run trains on: class_names.txt in its directory, a line each.

Predictions have names by this file, without the training data. The record of a checkpoint has a
digest of them, because the file may have been exchanged.
"""

import logging
from collections.abc import Sequence

from etils import epath

from het_plugin.system import checksum, run_files
from het_plugin.training import checkpoint_reader

_log = logging.getLogger(__name__)

FILE = 'class_names.txt'


def digest(names: Sequence[str] | None) -> str | None:
  """SHA-256 of the names and their order; None for none."""
  return checksum.json_digest(names) if names else None


def read(checkpoint: epath.PathLike) -> tuple[str, ...] | None:
  """The names in the directory of a run, or of a checkpoint's run; None without the file.

  Raises:
    ValueError: the file is damaged, or has other names than the checkpoint was trained with.
  """
  found = checkpoint_reader.find(checkpoint)
  return beside(found, checkpoint_reader.intact_record(found).get('class_names'))


def beside(checkpoint: epath.Path, trained_with: str | None) -> tuple[str, ...] | None:
  """`read` for a checkpoint whose record has the digest `trained_with`; None if it has none."""
  path = checkpoint.parent / FILE
  try:
    text = path.read_text()
  except OSError:
    return None
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is damaged: {error}') from error
  names = tuple(text.removesuffix('\n').split('\n'))  # an editor may leave the last line open
  if trained_with and digest(names) != trained_with:
    raise ValueError(
      f'{path} does not have the names, in their order, that {checkpoint.name} was trained with: '
      'put the file of the run back'
    )
  return names


def write(model_dir: epath.PathLike, names: Sequence[str]) -> None:
  """Writes the names into the folder of a run, one a line."""
  run_files.write_text(epath.Path(model_dir) / FILE, ''.join(f'{name}\n' for name in names))


def check(setting: str, given: Sequence[str] | None, names: Sequence[str] | None) -> None:
  """Compares the class names of a task, which `setting` chose, with those that a model was trained
  on, if both have names.

  Raises:
    ValueError: a name has different numbers, or a given one has a line break, which the file cannot
      keep. A name that only one of the two has is a warning.
  """
  if broken := [name for name in given or () if '\n' in name or '\r' in name]:
    raise ValueError(
      f'{setting}: the class name {broken[0]!r} has a line break; {FILE} cannot keep it'
    )
  if not names or not given or tuple(names) == tuple(given):
    return
  number = {name: k for k, name in enumerate(names)}
  for k, name in enumerate(given):
    if number.get(name, k) != k:
      raise ValueError(
        f'{setting}: {name!r} is class {k} here and class {number[name]} in the training data. The '
        'classes must be the same, in the same order'
      )
  for k, (new, old) in enumerate(zip(given, names, strict=False)):
    if new != old:
      _log.warning(
        '%s: class %d is %r here and %r in the training data. The two are taken to be the same '
        'class.', setting, k, new, old,
      )  # fmt: skip
      return
