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
from het_plugin.estimators.classifiers import CLASSIFIERS
from het_plugin.estimators.model import Model, on_features
from het_plugin.system import run_files
from het_plugin.weights.files import CHECKSUM, as_stored, check_sum, checksum, save_safetensors

_METADATA = 'het_plugin.estimator'
_MAX_NAME_BYTES = 2**30
_FITTED = (
  'target_',
  'C_noise_',
  'n_iter_',
  'objective_',
  'gradient_',
  'gap_',
  'n_features_in_',
)
_GRIDS = 'noise_nll_', 'tau_grid_nll_'  # {number: NLL} or None


def save(estimator: HeadClassifier, path: str) -> None:
  """Writes a fitted estimator, class names and calibration included.

      >>> import os, tempfile
      >>> from sklearn.datasets import load_iris
      >>> from het_plugin import estimators
      >>> x, y = load_iris(return_X_y=True)
      >>> det = estimators.DetClassifier().fit(x, y)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   path = os.path.join(folder, 'det.safetensors')
      ...   estimators.save(det, path)
      ...   opened = estimators.load(path)
      >>> bool((opened.predict(x) == det.predict(x)).all())
      True

  Args:
    estimator: a fitted one.
    path: a .safetensors file, whose folder is made if need be. The file has no pickle, and a
      checksum that `load` verifies.

  Raises:
    ValueError: the estimator is of another kind, such as a pipeline, or its classes are neither
      numbers nor strings.
    sklearn.exceptions.NotFittedError: the estimator has not been fitted.
    OSError: the file cannot be written; an old one is then still there.
  """
  names = class_names(estimator)
  dtype = estimator.classes_.dtype
  params = traverse_util.flatten_dict(estimator.params_, sep='/')
  arrays = {f'params/{name}': np.asarray(x) for name, x in params.items()}
  arrays['mean'] = np.asarray(estimator.mean_)
  if estimator.calibration_ is not None:
    for name in ('scale', 'shift', 'scores'):
      arrays[f'calibration/{name}'] = getattr(estimator.calibration_, name)
  settings = estimator.get_params()
  if isinstance(settings['class_weight'], dict):  # JSON has no keys that are numbers
    settings['class_weight'] = [[k, float(v)] for k, v in settings['class_weight'].items()]
  fitted = {name: getattr(estimator, name) for name in (*_FITTED, *_GRIDS)}
  fitted |= {name: [*fitted[name].items()] for name in _GRIDS if fitted[name] is not None}
  description = {
    'head': estimator._head,
    'settings': settings,
    'model': dataclasses.asdict(estimator.model_),
    'classes': names,
    'classes_dtype': dtype.str if dtype.kind != 'T' else '|O',  # a StringDType has no such text
    'feature_names': getattr(estimator, 'feature_names_in_', None),
    'fitted': fitted,
  }
  # Settings may be numbers of NumPy; of a RandomState nothing is left that is worth keeping.
  text = json.dumps(description, default=lambda x: getattr(x, 'tolist', lambda: None)())
  arrays = {name: as_stored(x) for name, x in arrays.items()}
  metadata = {_METADATA: text, CHECKSUM: checksum(text, arrays)}
  with run_files.replacing(path) as unfinished:
    save_safetensors(unfinished, arrays, metadata)


def check_kind(estimator: Any) -> None:
  """Raises ValueError for an estimator that is no head."""
  if not isinstance(estimator, HeadClassifier):
    raise ValueError(
      f'estimator must be a head of het_plugin; got {type(estimator).__name__}: give the last step '
      'of a pipeline, pipeline[-1]'
    )


def check_head(estimator: Any) -> None:
  """Raises ValueError for an estimator of another kind, NotFittedError for one without a fit."""
  check_kind(estimator)
  check_is_fitted(estimator)


def class_names(estimator: HeadClassifier) -> list[Any]:
  """`classes_` as JSON has them; errors as in `check_head`, and ValueError if it has no such."""
  check_head(estimator)
  names = estimator.classes_.tolist()
  dtype = estimator.classes_.dtype
  if json.loads(json.dumps(names, default=lambda _: None)) != names:
    raise ValueError(f'classes_ of the type {dtype} cannot be written: fit to numbers or strings')
  return names


def load(path: str) -> HeadClassifier:
  """Reads an estimator that `save` wrote.

  Args:
    path: the file.

  Returns:
    The fitted estimator: its predictions have the same bits.

  Raises:
    ValueError: the file contains no estimator, has no checksum, or is damaged.
  """
  try:
    with safetensors.safe_open(path, framework='numpy') as file:
      metadata = file.metadata() or {}
      arrays = {name: file.get_tensor(name) for name in file.keys()}
    text = metadata[_METADATA]
    check_sum(metadata, text, arrays)
    return _estimator(json.loads(text), arrays)
  except Exception as error:  # damage makes safetensors, json and numpy raise many types
    reason = ' '.join(str(error).split())
    reason = f'{type(error).__name__}: {reason}' if isinstance(error, KeyError) else reason
    raise ValueError(f'{path} holds no estimator of het_plugin: {reason}') from error


def _estimator(description: dict[str, Any], arrays: dict[str, np.ndarray]) -> HeadClassifier:
  """The estimator of a file."""
  settings = description['settings'] | {
    'hidden_layers': tuple(description['settings']['hidden_layers'])
  }
  if isinstance(settings.get('class_weight'), list):
    settings['class_weight'] = dict(settings['class_weight'])
  estimator = CLASSIFIERS[description['head']](**settings)
  for name in _FITTED:
    setattr(estimator, name, description['fitted'].get(name))
  for name in _GRIDS:
    grid = description['fitted'].get(name)
    setattr(estimator, name, None if grid is None else dict(grid))
  if (names := description.get('feature_names')) is not None:
    vars(estimator).update(feature_names_in_=np.array(names, object))
  dtype = np.dtype(description['classes_dtype'])
  if dtype.itemsize * len(description['classes']) > _MAX_NAME_BYTES:
    raise ValueError(f'names of classes of the type {dtype} take more than {_MAX_NAME_BYTES} bytes')
  estimator.classes_ = np.array(description['classes'], dtype)
  estimator.mean_ = arrays['mean']
  params = {
    tuple(name.split('/')[1:]): x for name, x in arrays.items() if name.startswith('params/')
  }
  estimator.params_ = traverse_util.unflatten_dict(params)
  # JSON has lists; fields of a static argument of jit are tuples.
  fields: dict[str, Any] = {
    x: tuple(y) if isinstance(y, list) else y for x, y in description['model'].items()
  }
  fields['noise'] = tuple(map(tuple, fields['noise']))
  estimator.model_ = Model(**fields)
  estimator.calibration_ = None
  if 'calibration/scale' in arrays:
    parts = {name: arrays[f'calibration/{name}'] for name in ('scale', 'shift', 'scores')}
    estimator.calibration_ = Calibration(**parts)
  _check_sizes(estimator, params)
  return estimator


def _check_sizes(estimator, params):
  """Raises ValueError if the description states other sizes than the arrays have."""
  model = estimator.model_
  dim = estimator.n_features_in_
  # First, because the model has arrays of its padded classes.
  padded = -(-model.num_classes // model.class_multiple) * model.class_multiple
  stated = (dim,), padded, model.num_classes
  found = estimator.mean_.shape, len(params['head', 'bias']), len(estimator.classes_)
  shapes = {path: x.shape for path, x in params.items()}
  if stated != found or model.param_shapes(dim) != shapes:
    raise ValueError('its arrays have other shapes than its description states')


def to_checkpoint(estimator: HeadClassifier, path: str, backbone: Any = None) -> None:
  """Writes a file that starts a training run with the fitted head.

  The run binds `CheckpointConfig.restore = @RestoreCheckpointConfig()` and
  `RestoreCheckpointConfig.path` to the file. Without `backbone` it is one of gin/runs/features.gin,
  with `Mlp.hidden_layers` those of the estimator. The file has tau only if it was learned. Else the
  head of the run starts at its own: bind `LearnedTemperature.initial_tau` or
  `FixedTemperature.tau` to `estimator.temperature_`.

      >>> import os, tempfile
      >>> from sklearn.datasets import load_iris
      >>> from het_plugin import estimators, weights
      >>> det = estimators.DetClassifier().fit(*load_iris(return_X_y=True))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   path = os.path.join(folder, 'head.safetensors')
      ...   estimators.to_checkpoint(det, path)
      ...   sorted(weights.read_arrays(path))
      ['head/bias', 'head/kernel']

  Args:
    estimator: a fitted one. What its calibration adds is left out.
    path: a .safetensors or .npz file.
    backbone: what made the features: `runs.configuration(...)` of a run (the parameters that it is
      evaluated with), a file of weights in our names, or {'backbone/...': array}.

  Raises:
    ValueError: the estimator has hidden layers and there is a backbone below them, or the backbone
      has no parameters.
  """
  arrays = head_params(estimator)
  if backbone is None:
    weights.write_arrays(path, arrays)
    return
  if estimator.model_.hidden_layers:
    raise ValueError(
      f'hidden_layers={estimator.model_.hidden_layers} cannot be written to a run, which has no '
      'layers between backbone and head: fit without them'
    )
  if hasattr(backbone, 'read_params'):
    backbone = backbone.read_params()
  elif not isinstance(backbone, dict):
    try:
      backbone = weights.read_arrays(backbone)
    except ValueError as error:
      hint = f'that of a run is runs.configuration({str(backbone)!r})'
      raise ValueError(f'backbone: {error}; {hint}') from error
  found = {name: x for name, x in backbone.items() if name.startswith('backbone/')}
  if not found:
    raise ValueError('the backbone has no parameters under backbone/')
  weights.write_arrays(path, found | arrays)


def head_params(estimator: HeadClassifier) -> dict[str, np.ndarray]:
  """{'head/kernel': array, ...} of a head, and {'backbone/hidden_0/kernel': array, ...} of hidden
  layers, over the features themselves, as a training run names them.

  The mean that the estimator subtracts is added to the biases. What an estimator's calibration adds
  is left out.

  Args:
    estimator: a fitted one.

  Returns:
    float32 arrays by name; HET-H's have all buckets.

  Raises:
    ValueError: the estimator is of another kind.
    sklearn.exceptions.NotFittedError: the estimator has not been fitted.
  """
  check_head(estimator)
  flat = traverse_util.flatten_dict(estimator.params_, sep='/')
  flat = {name: np.asarray(x) for name, x in flat.items()}
  if estimator._head == 'het_h':
    flat = _all_buckets(estimator, flat)
  flat = moved(estimator.model_, flat, estimator.mean_)
  return {name if name.startswith('head/') else f'backbone/{name}': x for name, x in flat.items()}


def moved(model: Model, flat: dict[str, np.ndarray], shift: np.ndarray) -> dict[str, np.ndarray]:
  """Parameters by name that say of x what the given ones say of x - shift [D]."""
  flat = dict(flat)
  for name, kernel in list(flat.items()):
    if on_features(model, tuple(name.split('/'))):
      bias = name.removesuffix('kernel') + 'bias'
      of_shift = np.tensordot(shift, kernel.astype(np.float64), 1)
      flat[bias] = (flat[bias] - of_shift).astype(np.float32)
  return flat


def _all_buckets(estimator, flat):
  """The parameters of HET-H with all buckets; those without a class are 0, their optimum."""
  head = estimator.model_.make_head()
  width = len(flat['head/kernel'])
  used = head.used_buckets(width)
  full = {}
  for name, x in flat.items():
    if name.startswith('head/covariance/'):
      zeros = np.zeros((*x.shape[:-1], estimator.num_buckets or width), np.float32)
      zeros[..., used] = x
      x = zeros
    full[name] = x
  return full


def from_head(
  head: linen_heads.Classifier, params: dict[str, Any], classes: Any = None
) -> HeadClassifier:
  """A linen head as an estimator of its pre-logits.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin import estimators, heads
      >>> head, phi = heads.HetXL(num_classes=3, num_factors=2), jnp.ones((5, 4))
      >>> opened = estimators.from_head(head, head.init(jax.random.key(0), phi)['params'])
      >>> opened.predict_proba(phi).shape
      (5, 3)

  Args:
    head: the module.
    params: its parameters.
    classes: [K] names; None numbers them.

  Raises:
    ValueError: the head has settings that no estimator has, or classes are not K.
  """
  kind = next((name for name, cls in linen_heads.HEADS.items() if type(head) is cls), None)
  if kind is None or getattr(head, 'get_logits', None) is not None:
    raise ValueError(f'{type(head).__name__} is not a head of an estimator')
  classes = np.arange(head.num_classes) if classes is None else np.asarray(classes)
  if classes.shape != (head.num_classes,):
    raise ValueError(f'classes has shape {classes.shape}; the head has {head.num_classes} classes')
  params = jax.tree.map(np.asarray, params)
  fields = {name: getattr(head, name) for name in CLASSIFIERS[kind]._noise}
  temperature = head.own_temperature
  tau = None
  tau_range = (0.05, 5.0)
  if isinstance(temperature, linen_heads.LearnedTemperature):
    tau_range = temperature.tau_min, temperature.tau_max
  else:
    tau = temperature.tau
  estimator = CLASSIFIERS[kind](tau='learned' if tau is None else tau, **fields)
  width = params['kernel'].shape[0]
  others = {
    name: getattr(head, name)
    for name in ('parametrization', 'remainder', 'factor_bias')
    if hasattr(head, name)
  }
  estimator.model_ = Model(
    head=kind,
    num_classes=head.num_classes,
    link=head.link,
    tau=tau,
    tau_range=tau_range,
    num_samples=estimator.num_samples,
    noise=tuple((fields | others).items()),
    class_multiple=head.class_multiple,
  )
  if kind == 'het_h' and head.empty_buckets:
    used = head.used_buckets(width)
    covariance = {name: x[..., used] for name, x in params['covariance'].items()}
    params = {**params, 'covariance': covariance}
  estimator.params_ = {'head': params}
  estimator.mean_ = np.zeros(width, np.float32)
  estimator.classes_ = classes
  estimator.target_ = 'indicator' if head.link == 'sigmoid' else 'classes'
  estimator.calibration_ = None
  estimator.n_iter_ = 0
  vars(estimator).update(n_features_in_=width, C_noise_=None)
  vars(estimator).update(objective_=None, gradient_=None, gap_=None)
  vars(estimator).update(dict.fromkeys(_GRIDS))
  return estimator
