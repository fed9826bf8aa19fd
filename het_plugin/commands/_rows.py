"""Rows to fit heads to: of a file, or of a checkpoint that is represented first."""

import dataclasses
from collections.abc import Sequence

from het_plugin.cli.settings import Gin


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsSettings(Gin):
  """Where the rows are.

  Attributes:
    train: Rows: F.npz[:SPLIT], F.safetensors or X.npy,Y.npy; or a run.
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

  def represented(self, program: str, splits: Sequence[str]) -> list[str]:
    """The files of splits of the checkpoint, written if they are not there."""
    from het_plugin.evaluation import represent  # imports tasks, which files do not need

    of_run = self.checkpoint, self.gin, self.dataset, self.output_dir
    return represent.files_of(program, *of_run, splits, self.layer)
