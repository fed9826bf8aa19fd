"""A run as a program for serving: images, or features, to the predictive distribution."""

import copy
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from het_plugin.runs import Run
from het_plugin.weights import programs


def export(run: Run, folder: str, kind: str, *, entropies: bool = False) -> dict[str, Any]:
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
  programs.check(folder, kind)
  if not hasattr(run.model, 'served'):
    raise ValueError(
      f'{run.checkpoint} is a contrastive model, whose classes are texts: it is not exported as a '
      'program; its image tower is exported to a file without --format'
    )
  if run.step is None:
    raise ValueError(
      f'{run.checkpoint} is a published file, whose head is not trained: export the run itself'
    )
  model = run.model
  if kind == 'onnx':
    # ONNX's bfloat16 is float32, and what is written is compared with a model that rounds alike.
    module = model.module.clone(backbone=_float32(model.backbone), head=_float32(model.head))
    model = copy.copy(model)
    model.backbone = module.backbone
    model.head = module.head
    model.module = module
  with run.config.active():
    return programs.write(_program(run, model, entropies), folder, kind)


def _float32(module: nn.Module) -> nn.Module:
  if isinstance(inner := getattr(module, 'module', None), nn.Module):  # of a `PlainBackbone`
    return module.clone(module=_float32(inner))
  return module.clone(dtype=jnp.float32) if hasattr(module, 'dtype') else module


def _program(run: Run, model: Any, entropies: bool) -> programs.Program:
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
  return programs.Program(function, params, name, shape, about)
