"""Rows to fit heads to: of a file, or of a checkpoint that is represented first."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from het_plugin.cli.settings import Gin
from het_plugin.commands import represent
from het_plugin.rows import Rows, label_rows
from het_plugin.rows import read as read_rows
from het_plugin.system import run_files

FileOrArrays = str | tuple[np.ndarray, np.ndarray] | Rows
_SHARD = re.compile(r'-\d+-of-(\d+)')
GIN = ('gin_file', 'gin_bindings', 'gin_search_paths')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsSettings(Gin):
  """Where the rows are.

  Attributes:
    train: Rows: F.npz[:SPLIT], F.safetensors, F-*.safetensors or X.npy,Y.npy; or a run.
    checkpoint: Instead of files: a run or a published file.
    dataset: With --checkpoint: the task to represent.
    layer: With --checkpoint: the layer to represent.
    output_dir: With --checkpoint: where to write its files.
  """

  train: str | None = None
  checkpoint: str | None = None
  dataset: str | None = None
  layer: str = 'pre_logits'
  output_dir: str = 'representations'

  def check_rows(self, of_files: Sequence[str], of_checkpoint: Sequence[str]) -> None:
    """Raises ValueError unless there is either --train, or --checkpoint and --dataset.

    `of_files` are the flags that cannot go with --checkpoint, `of_checkpoint` those that need it.
    """
    files = [name for name in of_files if getattr(self, name)]
    if files and self.checkpoint:
      raise ValueError(f'--{files[0]} and --checkpoint cannot go together: set one of them')
    if not (self.train or self.checkpoint and self.dataset):
      raise ValueError('--train is needed, or --checkpoint and --dataset')
    of_checkpoint = [*of_checkpoint, 'layer', 'output_dir', 'gin_file', 'gin_bindings']
    if self.train and (given := [name for name in of_checkpoint if name in self.given]):
      raise ValueError(f'--{given[0]} is for --checkpoint, whose representations are computed here')

  @property
  def unfinished(self) -> Path | None:
    """Where fits are kept until the results are written (`resuming.kept`): beside the first one."""
    for name in ('json', 'html'):
      path = getattr(self, name, None)
      if path and not run_files.is_remote(path) and not run_files.is_written_to(path):
        return Path(f'{path}.unfinished')
    return None

  def represented(self, program: str, splits: Sequence[str]) -> list[str]:
    """The files of splits of the checkpoint, written if they are not there."""
    of_run = self.chosen('checkpoint', 'dataset', 'output_dir', *GIN)
    what = represent.Settings(splits=','.join(splits), layers=(self.layer,), **of_run)
    return [row['file'] for row in represent.represent(what, program)['files']]


def files_of(folder: Path) -> tuple[str, str | None]:
  """The files train and test, or else validation, in a folder, or its only file."""
  files = [*folder.rglob('[!.]*.safetensors'), *folder.rglob('[!.]*.npz')]
  # Neither those of an unfinished split, nor each of several files that are one split.
  files = (x for x in files if not x.parent.name.startswith('.'))
  files = sorted({x.with_name(_SHARD.sub(r'-*-of-\1', x.name)) for x in files})
  if len(files) == 1:
    return str(files[0]), None
  usual = 'train', 'test', 'validation'
  train, test, validation = (
    [str(x) for x in files if x.stem.partition('-*')[0] == split] for split in usual
  )
  if len(train) == len(test or validation) == 1:
    return train[0], (test or validation)[0]
  raise ValueError(
    f'--train={folder} must have one .safetensors or .npz file, or one named train and one named '
    f'test or validation; it has {", ".join(map(str, files)) or "none"}: name a file, and another '
    'as --test'
  )


def read(source: FileOrArrays, name: str) -> tuple[Rows, str]:
  """Rows with features, and their name."""
  if isinstance(source, Rows):
    return source, source.provenance.get('source', name)
  if isinstance(source, str):
    return read_rows(source, mapped=True), source
  x = np.asanyarray(source[0])
  y = np.asarray(source[1])  # keeps a memory map
  return Rows({'features': x}, label_rows(y, len(x)), np.arange(len(x))), name
