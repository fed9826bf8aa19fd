"""Saves fitted estimators as safetensors with JSON metadata (no pickle), and converts heads."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from flax import traverse_util
from sklearn.utils.validation import check_is_fitted

from het_plugin import heads as linen_heads
from het_plugin import weights
from het_plugin.estimators.calibration import Calibration
from het_plugin.estimators.classifier import HeadClassifier
from het_plugin.estimators.heads import CLASSIFIERS
from het_plugin.estimators.model import HEADS, Model, on_features

_METADATA = 'het_plugin.estimator'
_FITTED = ('target_', 'n_iter_', 'objective_', 'gradient_', 'n_features_in_')


def save(estimator: HeadClassifier, path: str) -> None:
  """Writes a fitted estimator to PATH.safetensors, class names and calibration included."""
  check_is_fitted(estimator)
  params = traverse_util.flatten_dict(estimator.params_, sep='/')
  arrays = {f'params/{name}': np.asarray(x) for name, x in params.items()}
  arrays['mean'] = np.asarray(estimator.mean_)
  if estimator.calibration_ is not None:
    for name in ('scale', 'shift', 'scores'):
      arrays[f'calibration/{name}'] = getattr(estimator.calibration_, name)
  description = {
    'head': estimator._head,
    'settings': estimator.get_params(),
    'model': dataclasses.asdict(estimator.model_),
    'classes': estimator.classes_.tolist(),
    'classes_dtype': estimator.classes_.dtype.str,
    'fitted': {name: getattr(estimator, name) for name in _FITTED},
  }
  # Settings may be numbers of NumPy; of a RandomState nothing is left that is worth keeping.
  metadata = json.dumps(description, default=lambda x: getattr(x, 'tolist', lambda: None)())
  # A copy in C order, because safetensors writes the memory of an array as it is.
  arrays = {name: np.array(x, order='C') for name, x in arrays.items()}
  with weights.replacing(path) as unfinished:
    safetensors.numpy.save_file(arrays, unfinished, metadata={_METADATA: metadata})


def load(path: str) -> HeadClassifier:
  """Reads an estimator that `save` wrote.

  Raises:
    ValueError: the file contains no estimator, or is damaged.
  """
  try:
    with safetensors.safe_open(path, framework='numpy') as file:
      description = json.loads((file.metadata() or {})[_METADATA])
      arrays = {name: file.get_tensor(name) for name in file.keys()}
  except (KeyError, ValueError, OSError, safetensors.SafetensorError) as error:
    raise ValueError(f'{path} holds no estimator of het_plugin: {error}') from error
  settings = description['settings'] | {
    'hidden_layers': tuple(description['settings']['hidden_layers'])
  }
  estimator = CLASSIFIERS[description['head']](**settings)
  for name, value in description['fitted'].items():
    setattr(estimator, name, value)
  estimator.classes_ = np.array(description['classes'], description['classes_dtype'])
  estimator.mean_ = arrays['mean']
  params = {
    tuple(name.split('/')[1:]): x for name, x in arrays.items() if name.startswith('params/')
  }
  estimator.params_ = traverse_util.unflatten_dict(params)
  # JSON has lists; fields of a static argument of jit are tuples.
  model = {x: tuple(y) if isinstance(y, list) else y for x, y in description['model'].items()}
  estimator.model_ = Model(**model | {'noise': tuple(map(tuple, model['noise']))})
  parts = {name: arrays.get(f'calibration/{name}') for name in ('scale', 'shift', 'scores')}
  estimator.calibration_ = None if parts['scale'] is None else Calibration(**parts)
  return estimator


def to_checkpoint(estimator: HeadClassifier, path: str, backbone: Any = None) -> None:
  """Writes a file that starts a training run with the fitted head.

  The run binds `CheckpointConfig.restore = @RestoreCheckpointConfig()` and
  `RestoreCheckpointConfig.path` to the file. Without `backbone` it is one of gin/runs/features.gin,
  with `Mlp.hidden_layers` those of the estimator.

  Args:
    estimator: a fitted one. What its calibration adds is left out.
    path: a .safetensors or .npz file.
    backbone: what made the features: the directory of a run (the parameters that it is evaluated
      with, and its gin configuration is the current one afterwards), a file of weights in our
      names, or {'backbone/...': array}.

  Raises:
    ValueError: the estimator has hidden layers and there is a backbone below them, or the backbone
      has no parameters.
  """
  arrays = head_params(estimator)
  if backbone is None:
    weights.write_arrays(path, arrays)
    return
  if estimator.hidden_layers:
    raise ValueError(
      f'hidden_layers={tuple(estimator.hidden_layers)} lie between backbone and head, where a run '
      'has none: fit without them'
    )
  if not isinstance(backbone, dict):
    if weights.is_weights_file(backbone):
      backbone = weights.read_arrays(backbone)
    else:
      from het_plugin import runs  # imports TensorFlow

      backbone = runs.configuration(backbone).read_params()
  found = {name: x for name, x in backbone.items() if name.startswith('backbone/')}
  if not found:
    raise ValueError('the backbone has no parameters under backbone/')
  weights.write_arrays(path, found | arrays)


def head_params(estimator: HeadClassifier) -> dict[str, np.ndarray]:
  """{'head/kernel': array, ...} of a head, and {'backbone/hidden_0/kernel': array, ...} of hidden
  layers, over the features themselves, as a training run names them.

  The mean that the estimator subtracts is added to the biases. What an estimator's calibration adds
  is left out.
  """
  check_is_fitted(estimator)
  flat = traverse_util.flatten_dict(estimator.params_, sep='/')
  flat = {name: np.asarray(x) for name, x in flat.items()}
  if estimator._head == 'het_h':
    flat = _all_buckets(estimator, flat)
  for name, kernel in list(flat.items()):
    if on_features(estimator.model_, tuple(name.split('/'))):
      bias = name.removesuffix('kernel') + 'bias'
      shift = np.tensordot(estimator.mean_, kernel, 1)
      flat[bias] = (flat[bias] - shift).astype(np.float32)
  return {name if name.startswith('head/') else f'backbone/{name}': x for name, x in flat.items()}


def _all_buckets(estimator, flat):
  """The parameters of HET-H with all buckets; those without a class are 0, their optimum."""
  head, width = estimator.model_.make_head(), len(flat['head/kernel'])
  used = head.used_buckets(width)
  full = {}
  for name, x in flat.items():
    if name.startswith('head/covariance/'):
      zeros = np.zeros((*x.shape[:-1], estimator.num_buckets or width), np.float32)
      zeros[..., used] = x
      x = zeros
    full[name] = x
  return full


def from_run(checkpoint: str, classes: Any = None) -> HeadClassifier:
  """The head of a training run as an estimator of its pre-logits, which `represent` writes.

  Args:
    checkpoint: directory of a run (its newest checkpoint), or of one checkpoint in it.
    classes: [K] names; None numbers them.

  Raises:
    ValueError: there is no checkpoint, or the head has settings that no estimator has.
  """
  from het_plugin import runs  # imports TensorFlow

  run = runs.open_run(checkpoint)
  return from_head(run.model.head, run.params['head'], classes)


def from_head(
  head: linen_heads.Classifier, params: dict[str, Any], classes: Any = None
) -> HeadClassifier:
  """A linen head as an estimator of its pre-logits.

  Args:
    head: the module.
    params: its parameters.
    classes: [K] names; None numbers them.

  Raises:
    ValueError: the head has settings that no estimator has.
  """
  kind = next((name for name, cls in HEADS.items() if type(head) is cls), None)
  if kind is None or getattr(head, 'get_logits', None) is not None:
    raise ValueError(f'{type(head).__name__} is not a head of an estimator')
  params = jax.tree.map(np.asarray, params)
  fields = {name: getattr(head, name) for name in CLASSIFIERS[kind]._noise}
  fixed = not isinstance(head.temperature, linen_heads.LearnedTemperature)
  estimator = CLASSIFIERS[kind](tau=head.temperature.tau if fixed else 'learned', **fields)
  estimator.n_features_in_ = params['kernel'].shape[0]
  others = {
    name: getattr(head, name)
    for name in ('parametrization', 'remainder', 'factor_bias')
    if hasattr(head, name)
  }
  estimator.model_ = Model(
    head=kind,
    num_classes=head.num_classes,
    link=head.link,
    tau=head.temperature.tau if fixed else None,
    tau_range=(0.05, 5.0) if fixed else (head.temperature.tau_min, head.temperature.tau_max),
    num_samples=estimator.num_samples,
    noise=tuple((fields | others).items()),
    class_multiple=head.class_multiple,
  )
  if kind == 'het_h' and head.empty_buckets:
    used = head.used_buckets(estimator.n_features_in_)
    covariance = {name: x[..., used] for name, x in params['covariance'].items()}
    params = {**params, 'covariance': covariance}
  estimator.params_ = {'head': params}
  estimator.mean_ = np.zeros(estimator.n_features_in_, np.float32)
  estimator.classes_ = np.arange(head.num_classes) if classes is None else np.asarray(classes)
  estimator.target_ = 'indicator' if head.link == 'sigmoid' else 'classes'
  estimator.calibration_, estimator.n_iter_ = None, 0
  estimator.objective_ = estimator.gradient_ = None
  return estimator
