"""A fitted estimator as a program for serving: features to probabilities."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from het_plugin import heads
from het_plugin.estimators.classifier import HeadClassifier
from het_plugin.estimators.files import class_names, moved
from het_plugin.weights import programs


def export(
  estimator: HeadClassifier, folder: str, kind: str = 'stablehlo', *, entropies: bool = False
) -> dict[str, Any]:
  """Writes the folder of a program that runs without het_plugin (docs/serve.md).

      >>> import os, tempfile
      >>> from jax import export
      >>> from sklearn.datasets import load_iris
      >>> from het_plugin import estimators
      >>> x, y = load_iris(return_X_y=True)
      >>> det = estimators.DetClassifier().fit(x, y)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   about = estimators.export(det, f'{folder}/det')
      ...   with open(f'{folder}/det/program.stablehlo', 'rb') as file:
      ...     program = export.deserialize(bytearray(file.read()))
      >>> p = program.call(x.astype('float32'))['probabilities']
      >>> about['class_names'], bool(abs(p - det.predict_proba(x)).max() < 1e-5)
      ([0, 1, 2], True)

  The input is 'features', float32 [B, D], and the outputs are 'probabilities' [B, K], calibrated if
  the estimator is, and with `entropies` those of `entropy`, which are not calibrated.

  Args:
    estimator: a fitted one.
    folder: where the program is written; one that is there is replaced.
    kind: 'stablehlo', 'saved_model' or 'onnx'.
    entropies: whether entropies are outputs too.

  Returns:
    The metadata, which metadata.json has too; 'class_names' are `classes_`.

  Raises:
    sklearn.exceptions.NotFittedError: the estimator has not been fitted.
    ValueError: as in `save` and `weights.programs.write`.
  """
  names = class_names(estimator)
  model = estimator.model_
  calibration = estimator.calibration_
  # What float32 leaves of the mean goes into the biases; x - mean is then exact near the mean.
  mean = np.asarray(estimator.mean_, np.float32)
  flat = traverse_util.flatten_dict(jax.tree.map(np.asarray, estimator.params_), sep='/')
  flat = moved(model, flat, estimator.mean_ - mean.astype(np.float64))
  scaling = None
  if calibration is not None:
    scaling = jnp.float32(calibration.scale), jnp.float32(calibration.shift)

  def function(params: Any, x: jax.Array) -> Mapping[str, jax.Array]:
    logits = model.logits(params, x - mean)
    return heads.served(logits, model.integrator, entropies=entropies, scaling=scaling)

  about = {
    'head': type(model.make_head()).__name__,
    'link': model.link,
    'num_classes': model.num_classes,
    'tau': estimator.temperature_,
    'class_names': names,
  }
  params = traverse_util.unflatten_dict(flat, sep='/')
  program = programs.Program(function, params, 'features', mean.shape, about)
  return programs.write(program, folder, kind)
