"""Computes representations of a data set and saves them, one file per layer and split.

    python -m het_plugin.represent --checkpoint=runs/het_xl --dataset=digits \\
      --layers=pre_logits,block00 --output_dir=representations

writes representations/digits/pre_logits/train.safetensors and so on. Run it again to continue where
it stopped, also after SIGTERM or Ctrl-C (exit code 42); complete files stay. The checkpoint is a
run's directory, one checkpoint in it, a file of timm, transformers or open_clip, or another
published file, whose model --gin_file gives.
--arrays=FILE in place of --checkpoint and --dataset turns arrays made elsewhere into such files.
"""

import dataclasses
from typing import Annotated, ClassVar

from het_plugin import reporting
from het_plugin.cli.settings import Gin, OneOf, Processes
from het_plugin.evaluation import represent
from het_plugin.rows import files
from het_plugin.runs.run import POOLS
from het_plugin.system.ranges import Count

_OF_FILES = ('format', 'dtype', 'overwrite')
_OF_A_MODEL = ('splits', 'layers', 'pool', 'batch_size', 'max_examples', 'image_size')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin, Processes):
  """What is represented, and where it is written.

  Attributes:
    checkpoint: A run's directory, a checkpoint, .npz or .safetensors.
    dataset: A task (digits, npz:PATH, image_folder:PATH, tfds:NAME ...), .npz or folder.
    splits: Splits, by comma; all that are finite by default. Slices: train[:2000].
    layers: Representations of the backbone.
    pool: Positions of a layer are averaged, or put side by side.
    arrays: F.npz, F.safetensors or X.npy,Y.npy: features made elsewhere, and labels.
    output_dir: Where DATASET/LAYER/SPLIT files are written.
    format: Format of the files.
    dtype: Type of the features.
    batch_size: Global batch.
    max_examples: At most so many examples per split, chosen at random.
    image_size: Side in pixels; what the run was trained on by default.
    overwrite: Replaces files that were made with other settings.
    json: Where the table is written as JSON.
  """

  aliases: ClassVar = {'split': 'splits'}

  checkpoint: str | None = None
  dataset: str | None = None
  splits: str | None = None
  layers: tuple[str, ...] = ('pre_logits',)
  pool: Annotated[str, OneOf(POOLS)] = 'mean'
  arrays: str | None = None
  output_dir: str | None = None
  format: Annotated[str, OneOf(('safetensors', 'npz'))] = 'safetensors'
  dtype: Annotated[str, OneOf(files.DTYPES)] = 'float32'
  batch_size: Count = 256
  max_examples: Count | None = None
  image_size: Count | None = None
  overwrite: bool = False
  json: str | None = None


def run(settings: Settings) -> reporting.Report:
  """The files, with their sizes."""
  if settings.arrays is None and not (settings.checkpoint and settings.dataset):
    raise ValueError('--checkpoint and --dataset are needed, or --arrays')
  if settings.arrays:
    of_runs = 'checkpoint', 'dataset', 'gin_file', 'gin_bindings', *_OF_A_MODEL
    if given := [name for name in of_runs if name in settings.given]:
      raise ValueError(
        f'--{given[0]} cannot go with --arrays={settings.arrays}, which are features'
      )
  settings.join()
  of_files = settings.chosen(*_OF_FILES)
  if settings.arrays:
    result = represent.convert(settings.arrays, settings.output_dir, **of_files)
  else:
    of_model = settings.chosen(*_OF_A_MODEL)
    source = settings.checkpoint, settings.gin, settings.dataset
    result = represent.represent(*source, settings.output_dir, **of_files, **of_model)
  return reporting.Report(
    title='Representations', introduction=represent.table(result['files']), json=result
  )
