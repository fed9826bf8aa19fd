"""Writes a run's parameters in the format of other projects, or the run as a program for serving.

    python -m het_plugin.export --checkpoint=runs/het_xl --output=het_xl.npz
    python -m het_plugin.export --checkpoint=runs/het_xl --output=runs/het_xl_t5x

A file (.npz or .safetensors) has a ViT under vision_transformer's names, a ResNet (v2) under Big
Transfer's, and a heteroscedastic head under uncertainty-baselines'. Of a contrastive model only the
image tower is written. The configuration is the run's own config.gin.
`RestoreCheckpointConfig.path` reads such files. The metadata of a .safetensors file say what it is:
head, link, temperature, class names and images. If --output is a directory, a checkpoint of t5x
with the state of the optimizer is written, to continue there (docs/t5x.md).

    python -m het_plugin.export --checkpoint=runs/het_xl --output=het_xl_program --format=onnx

With --format, the folder --output gets a program from images, or features, to probabilities that
runs without het_plugin (docs/serve.md).

    python -m het_plugin.export --check=het_xl_program

With --check, the program there is run on the input that its folder holds, and its outputs are
compared with those of the model that was exported.
"""

import dataclasses
from pathlib import Path

import numpy as np

from het_plugin.cli.settings import Gin
from het_plugin.config import changes
from het_plugin.evaluation import serve
from het_plugin.runs import configuration, open_run
from het_plugin.weights import is_weights_file, programs, write_arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Gin):
  """What is written, and where.

  Attributes:
    checkpoint: A run's directory; its newest checkpoint.
    output: Where to write: a file, .npz or .safetensors; or the directory of a run under t5x, or of
      a program.
    format: Of a program for serving: stablehlo, saved_model, onnx. None: parameters.
    entropies: Whether a program gives entropies too.
    check: A program that is there, a folder or a file: it is compared.
  """

  checkpoint: str | None = None
  output: str | None = None
  format: str | None = None
  entropies: bool = False
  check: str | None = None


def run(settings: Settings) -> None:
  """Writes, or compares a program."""
  if settings.check:
    others = 'checkpoint', 'output', 'format', 'entropies', 'gin_file', 'gin_bindings'
    settings.refuse(others, '--check')
    for name, difference in programs.compare(settings.check).items():
      print(f'{name}: differs by at most {difference:.1g}')
    return
  checkpoint = settings.checkpoint
  output = settings.output
  if not checkpoint:
    raise ValueError('--checkpoint is not set')
  if not output:
    raise ValueError('--output is not set')
  if settings.format:
    programs.check(output, settings.format)
    opened = open_run(checkpoint, *settings.gin)
    about = serve.export(opened, output, settings.format, entropies=settings.entropies)
    outputs = ', '.join(f'{name} {x["shape"]}' for name, x in about['outputs'].items())
    print(f'A program ({settings.format}): {output}')
    print(f'{about["input"]["name"]} {about["input"]["shape"]} -> {outputs}')
    return
  if settings.entropies:
    raise ValueError('--entropies are outputs of a program: set --format')
  if is_weights_file(output):
    config = configuration(checkpoint, *settings.gin)
    arrays = config.published_params()
    write_arrays(output, arrays, config.describe())
    size = sum(np.size(x) for x in arrays.values())
    print(f'{len(arrays)} arrays, {size / 1e6:.2f}M parameters: {output}')
    return
  folder = Path(output)
  # A folder may have a version in its name: 'runs/birds_v1.5'.
  is_file = folder.suffix[1:2].isalpha() or folder.is_file()
  if is_file and not folder.is_dir():
    raise ValueError(f'--output={output} must end in .npz or .safetensors, or be a directory')
  of_a_run = any(folder.glob('checkpoint_*')) or (folder / changes.CONFIG).exists()
  if folder.is_dir() and any(folder.iterdir()) and not of_a_run:
    raise ValueError(
      f'--output={output} is a folder with other files: name a new one, or that of a run'
    )
  from het_plugin.hosts.t5x import conversion

  if settings.gin_file or settings.gin_bindings:
    raise ValueError(
      'a checkpoint of t5x has the configuration of its run: it takes no --gin_file and no bindings'
    )
  print(f'A checkpoint of t5x: {conversion.write_t5x(checkpoint, output)}')
