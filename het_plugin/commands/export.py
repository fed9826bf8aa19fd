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

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from het_plugin import runs, weights
from het_plugin.cli.settings import Gin


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
    for name, difference in weights.programs.compare(settings.check).items():
      print(f'{name}: differs by at most {difference:.1g}')
    return
  checkpoint = settings.checkpoint
  output = settings.output
  if not (checkpoint and output):
    raise ValueError('--checkpoint and --output are needed, or --check')
  if settings.format:
    weights.programs.check(output, settings.format)
    opened = runs.open_run(checkpoint, *settings.gin)
    about = export(opened, output, settings.format, entropies=settings.entropies)
    outputs = ', '.join(f'{name} {x["shape"]}' for name, x in about['outputs'].items())
    print(f'A program ({settings.format}): {output}')
    print(f'{about["input"]["name"]} {about["input"]["shape"]} -> {outputs}')
    return
  if settings.entropies:
    raise ValueError('--entropies are outputs of a program: set --format')
  if output.endswith(weights.files.SUFFIXES):
    config = runs.configuration(checkpoint, *settings.gin)
    arrays = config.published_params()
    weights.write_arrays(output, arrays, config.describe())
    size = sum(np.size(x) for x in arrays.values())
    print(f'{len(arrays)} arrays, {size / 1e6:.2f}M parameters: {output}')
    return
  folder = Path(output)
  # A folder may have a version in its name: 'runs/birds_v1.5'.
  is_file = folder.suffix[1:2].isalpha() or folder.is_file()
  if is_file and not folder.is_dir():
    raise ValueError(f'--output={output} must end in .npz or .safetensors, or be a directory')
  from het_plugin.config import changes

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


def export(run: runs.Run, folder: str, kind: str, *, entropies: bool = False) -> dict[str, Any]:
  """Writes the folder of a program (`programs`), which replaces one that is there.

  Its input is 'image', float32 [B, H, W, C] in [-1, 1], or of a run on rows of features
  'features' [B, D]. Its outputs are those of `heads.served`.

  Args:
    run: a run of a classifier, opened from files.
    folder: where the program is written.
    kind: 'stablehlo', 'saved_model' or 'onnx'.
    entropies: whether entropies are outputs too.

  Returns:
    The metadata, which metadata.json has too.

  Raises:
    ValueError: the model has no classes of its own, or a head that is not trained, or as in
      `programs.write`.
  """
  weights.programs.check(folder, kind)
  if not hasattr(run.model, 'served'):
    raise ValueError(
      f'{run.checkpoint} is a contrastive model, whose classes are texts: it is not exported as a '
      'program; its image tower is exported to a file without --format'
    )
  if run.reads_sheets:
    raise ValueError(
      f'{run.checkpoint} takes pictures of any aspect (NaFlex), and a program takes squares: use '
      'predict'
    )
  run.config.checkpoint.check_trained(hint='export the run itself')
  model = run.model
  if kind == 'onnx':
    # ONNX's bfloat16 is float32, and what is written is compared with a model that rounds alike.
    module = model.module.clone(backbone=_float32(model.backbone), head=_float32(model.head))
    model = copy.copy(model)
    model.backbone = module.backbone
    model.head = module.head
    model.module = module
  with run.config.active():
    return weights.programs.write(_program(run, model, entropies), folder, kind)


def _float32(module: Any) -> Any:
  import jax.numpy as jnp
  from flax import linen as nn

  if isinstance(inner := getattr(module, 'module', None), nn.Module):  # of a `PlainBackbone`
    return module.clone(module=_float32(inner))
  return module.clone(dtype=jnp.float32) if hasattr(module, 'dtype') else module


def _program(run: runs.Run, model: Any, entropies: bool) -> weights.programs.Program:
  import jax

  side = run.image_size
  channels = run.channels
  is_features = side == 1  # the task features:PATH has images of one pixel
  shape = (channels,) if is_features else (side, side, channels)

  def function(params: Any, x: jax.Array) -> Mapping[str, jax.Array]:
    image = x.reshape(x.shape[0], side, side, channels)
    return model.served(params, image, entropies=entropies)

  params = jax.tree.map(np.asarray, run.params)
  any_image = {'image': np.zeros((1, side, side, channels), np.float32)}
  tau = float(run.model.logits(params, any_image).temperature)
  about = run.config.describe() | {'step': run.step, 'tau': tau}
  if is_features:
    for name in ('image_size', 'image_range', 'resize'):
      del about[name]
  name = 'features' if is_features else 'image'
  return weights.programs.Program(function, params, name, shape, about)
