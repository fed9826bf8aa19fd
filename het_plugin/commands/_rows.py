"""Rows to fit heads to: of a source, or of a checkpoint that is represented first."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from het_plugin import runs
from het_plugin.cli.settings import Gin
from het_plugin.commands import represent
from het_plugin.rows import Rows, label_rows
from het_plugin.system import run_files

TextOrArrays = str | tuple[np.ndarray, np.ndarray] | Rows
OF_CHECKPOINT = '--checkpoint, whose representations are computed here'
GIN = ('gin_file', 'gin_bindings', 'gin_search_paths')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsSettings(Gin):
  """Where the rows are.

  Attributes:
    train: Rows: F.npz[:SPLIT], F.safetensors, X.npy,Y.npy, a folder of them, a run or a task.
    checkpoint: Instead of rows: a run or a published file.
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
    if self.train:
      of_checkpoint = [*of_checkpoint, 'layer', 'output_dir', 'gin_file', 'gin_bindings']
      self.refuse(of_checkpoint, OF_CHECKPOINT, 'is for')

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


def read(source: TextOrArrays, name: str, split: str | None = None) -> tuple[Rows, str]:
  """Rows with features, and their name; of a text those of the split, see `open_source`."""
  if isinstance(source, str):
    return runs.sources.open_source(source).rows(split), source
  if isinstance(source, Rows):
    return source, source.provenance.get('source', name)
  x = np.asanyarray(source[0])
  y = np.asarray(source[1])  # keeps a memory map
  return Rows({'features': x}, label_rows(y, len(x)), np.arange(len(x))), name


def have_learned(rows: Rows) -> bool:
  """Whether the features are of a run that was trained on the labels, as far as they say so."""
  made = rows.provenance
  is_own_task = repr(made.get('dataset')) in made.get('config', '')
  return made.get('split') == 'train' and is_own_task
