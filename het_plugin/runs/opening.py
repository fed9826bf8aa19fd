"""Opens what a training left: its configuration, its parameters, and both as a `Run`.

    run = runs.open_run('runs/het_xl')
    run.represent(batch, ('pre_logits',))

A checkpoint is a run's directory (its newest checkpoint), one checkpoint in it
(runs/het_xl/checkpoint_400) or a published file (.npz, .safetensors), whose model gin files
describe unless it is a tower of timm, transformers or open_clip. The directory may be one of t5x
that has our config.gin. The imports of a run's configuration are limited (`foreign`). gin's own
configuration is as before afterwards.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath
from flax import traverse_util

import gin
from het_plugin import data, weights
from het_plugin.config import changes, foreign, gin_state, parsing, registry, uses
from het_plugin.runs.checkpoint import Checkpoint
from het_plugin.runs.run import Run
from het_plugin.training import class_names, initial_state, optimizers
from het_plugin.training import state as state_lib
from het_plugin.weights import layouts

if TYPE_CHECKING:
  from het_plugin.estimators.classifier import HeadClassifier

_log = logging.getLogger(__name__)

PyTree = Any

# Frames of a published file's model: its image tower, or both towers.
PUBLISHED = 'het_plugin/gin/evaluation/published.gin'
PUBLISHED_PAIRS = 'het_plugin/gin/evaluation/published_pairs.gin'
TOKENIZER = 'tokenizer.json'  # beside the file
_PARTITIONS = 'PjitPartitioner.num_partitions'
_REPLICAS = 'PjitPartitioner.num_replicas'
_SUBMESH = 'PjitPartitioner.model_parallel_submesh'
MESH = (_REPLICAS, _PARTITIONS, _SUBMESH)  # what is fitted to the devices here
_READ = ('FewShotAction', 'ZeroShotAction')  # configurables that commands read beside `train`
_NEEDED = ('model', 'partitioner', 'train_dataset_cfg')
GinSettings = tuple[Sequence[str], Sequence[str], Sequence[str]]  # files, bindings, search paths
# For the schedule, which is not used here: its length may depend on data that are not here.
_ANY_STEPS = 10**9


class Configuration:
  """The configuration of a trained run, and where its parameters are.

  Attributes:
    checkpoint: the checkpoint, or the published file.
    text: the configuration as gin text.
  """

  def __init__(self, checkpoint: Checkpoint):
    """Takes gin's current configuration."""
    self.checkpoint = checkpoint
    self.text = gin.config_str()
    self._state = gin_state.capture()
    self._made: dict[str, Any] = {}

  @contextlib.contextmanager
  def active(self) -> Generator[None]:
    """gin's configuration is this one within the block."""
    with gin_state.preserved():
      gin_state.put_back(self._state)
      yield

  def argument(self, name: str) -> Any:
    """An argument of the run's `train`, such as 'model', made when it is first asked for."""
    from het_plugin.training import train

    if name not in self._made:
      with self.active():
        bound = gin.get_bindings(train.train, resolve_references=False)
        self._made[name] = copy.deepcopy(bound.get(name))  # which evaluates gin's references
    return self._made[name]

  def bindings(self, configurable: str) -> dict[str, Any]:
    """The arguments that are bound to a configurable, such as 'FewShotAction'."""
    with self.active():
      return gin.get_bindings(configurable)

  @property
  def task(self) -> str | None:
    """The task that the run trained on; None for a published file."""
    if self.checkpoint.step is None:
      return None
    return self.argument('train_dataset_cfg').mixture_or_task_name

  @property
  def class_names(self) -> tuple[str, ...] | None:
    """The names of the classes that the run trained on; None where they were not kept.

    Raises:
      ValueError: the head has another number of classes.
    """
    names = self.checkpoint.class_names
    num_classes = getattr(getattr(self.argument('model'), 'head', None), 'num_classes', None)
    if names and num_classes and len(names) != num_classes:
      raise ValueError(
        f'{class_names.FILE} beside {self.checkpoint.path} has {len(names)} names, and the head '
        f'has {num_classes} classes'
      )
    return names

  @property
  def resize(self) -> Any:
    """How photographs become square in evaluation, `DatasetConfig.resize`; None for the task's."""
    evaluated = self.argument('train_eval_dataset_cfg')
    found = getattr(evaluated or self.argument('train_dataset_cfg'), 'resize', None)
    return found if evaluated or not isinstance(found, str) else None

  def read_params(self) -> dict[str, np.ndarray]:
    """{name: array} of the parameters that a run is evaluated with, float32 on the host.

    They are their average where `with_ema` says so.
    """
    return self.checkpoint.read_params(self.evaluates_ema)

  @property
  def evaluates_ema(self) -> bool:
    """Whether the run is evaluated with the average of its parameters; not for a published file."""
    of_run = self.checkpoint.step is not None
    return of_run and optimizers.evaluates_ema(self.argument('model').optimizer_def)

  def published_params(self) -> dict[str, np.ndarray]:
    """`read_params` under the names of published files, see `weights.export_params`.

    Of a contrastive model it is the image tower, for which there are such names.
    """
    model = self.argument('model')
    if getattr(model.backbone, 'naflex', None):
      raise ValueError(
        f'{self.checkpoint.path} takes pictures of any aspect (NaFlex), for which published files '
        'have no names: keep the run'
      )
    params = self.read_params()
    num_classes = getattr(model.head, 'num_classes', None)
    noise_dim = None
    kernel = params.get('head/kernel')
    if num_classes is None:
      params = {name: x for name, x in params.items() if name.startswith('backbone/')}
    elif kernel is not None and hasattr(model.head, 'unpadded_noise_dim'):
      noise_dim = model.head.unpadded_noise_dim(len(kernel))
    num_heads = getattr(model.backbone, 'num_heads', 1)
    return weights.export_params(params, num_classes or 1, num_heads, noise_dim)

  def describe(self) -> dict[str, Any]:
    """What a file of the parameters should say of the model, as JSON values."""
    model = self.argument('model')
    lengths = self.argument('train_dataset_cfg').task_feature_lengths
    head = getattr(model, 'head', None)
    temperature = getattr(head, 'temperature', None)
    resize = self.resize
    bounds = {x: getattr(temperature, x, None) for x in ('tau', 'tau_min', 'tau_max')}
    return {
      'head': type(head).__name__,
      'link': getattr(head, 'link', None),
      'num_classes': getattr(head, 'num_classes', None),
      'temperature': {name: x for name, x in bounds.items() if x is not None},
      'class_names': self.class_names,
      'image_size': lengths['image'],
      'image_range': [-1, 1],
      'resize': dataclasses.asdict(resize) if dataclasses.is_dataclass(resize) else resize,
      'task': self.task,
      'checkpoint': self.checkpoint.path,
    }

  def open(self) -> Run:
    """The run on a mesh of the devices here; collective.

    Raises:
      ValueError: the parameters, or the images, do not fit the model.
    """
    checkpoint = self.checkpoint
    model = self.argument('model')
    partitioner = self.argument('partitioner')
    dataset = self.argument('train_dataset_cfg')
    lengths = dataset.task_feature_lengths
    data.preprocess.check_images(self.resize, model, checkpoint.path)

    def shapes_of(channels: int) -> dict[str, tuple[int, ...]]:
      made = jax.eval_shape(lambda: initial_variables(model, lengths, channels)['params'])
      return {name: x.shape for name, x in traverse_util.flatten_dict(made, sep='/').items()}

    channels = checkpoint.channels(shapes_of)
    init = functools.partial(initial_variables, model, lengths, channels)
    axes, state = initial_state.placed(
      lambda: state_lib.TrainState.create(model.optimizer_def, init()), partitioner
    )
    specs = axes.params
    flat = traverse_util.flatten_dict(state.params, sep='/')
    params = checkpoint.params_to(flat, model, self.evaluates_ema)
    if len(params) < len(flat):  # a published file has no head for the model
      fresh = partitioner.partition(lambda: init()['params'], (), specs)()
      params = traverse_util.flatten_dict(fresh, sep='/') | params
    return Run(
      model=model,
      partitioner=partitioner,
      params=traverse_util.unflatten_dict(params, sep='/'),
      param_specs=specs,
      image_size=lengths['image'],
      channels=channels,
      max_labels=lengths.get('label', 1),
      task=self.task,
      class_names=self.class_names,
      checkpoint=checkpoint.path,
      step=checkpoint.step,
      config=self,
      max_corrupt_fraction=getattr(dataset, 'max_corrupt_fraction', None),
      resize=self.resize,
    )


def configuration(
  checkpoint: epath.PathLike | Checkpoint,
  gin_files: Sequence[str] = (),
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = ('.',),
  published: str = PUBLISHED,
) -> Configuration:
  """Reads the configuration of a checkpoint.

  Args:
    checkpoint: a path, see the module docstring, or what `Checkpoint.find` finds there.
    gin_files: read after the run's config.gin. A published file needs those of its model, except
      for a tower of timm, transformers or open_clip.
    bindings: gin bindings that override everything else, such as
      'PjitPartitioner.num_partitions = 1'.
    search_paths: folders in which gin files are looked for.
    published: the frame of a published file, `PUBLISHED` or `PUBLISHED_PAIRS`.

  Raises:
    ValueError: there is no checkpoint, there is no configuration beside it, or it lacks something.
  """
  typed = bindings
  with gin_state.preserved():
    registry.register_trainer()  # first, because it hides the output of TensorFlow's import
    from het_plugin.training import train

    found = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.find(checkpoint)
    if found.config is None:
      frame = published
      arrays = found.arrays or {}
      has_model = any('BACKBONE' in binding for binding in bindings)
      if not (gin_files or has_model or weights.is_tower(arrays)):
        raise ValueError(f'{found.path}: {weights.not_recognised(arrays)}')
      own = _published_bindings(found, not gin_files, published == PUBLISHED_PAIRS)
      bindings = [*own, *bindings]
    else:
      frame = found.config
      if not frame.exists():
        raise ValueError(f'{found.path} has no configuration: {frame} does not exist')
      text = frame.read_text()
      foreign.check(text, str(frame))
      if trained_with := found.record.get('config'):
        changes.warn_of_another(found.path, frame, text, trained_with)
    parsing.parse_config([str(frame), *gin_files], bindings, search_paths)
    uses.check_typed(typed, [uses.of(gin.config_str(), called=_READ)])
    with gin.unlock_config():
      _fit_mesh(bindings)
      gin.parse_config([f'train.{name} = None' for name in ('actions', 'checkpoint_cfg')])
      gin.parse_config(f'TOTAL_STEPS = {_ANY_STEPS}')
    bound = gin.get_bindings(train.train, resolve_references=False)
    for name in _NEEDED:
      if bound.get(name) is None:
        raise ValueError(f'train.{name} is not set in the configuration of {found.path}')
    return Configuration(found)


def open_run(
  checkpoint: epath.PathLike | Checkpoint,
  gin_files: Sequence[str] = (),
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = ('.',),
  published: str = PUBLISHED,
) -> Run:
  """Opens a checkpoint on a mesh of the devices here; collective.

  The arguments are those of `configuration`. The run has the parameters that it is evaluated with.

  Raises:
    ValueError: as in `configuration`, or the parameters do not fit the model.
  """
  return configuration(checkpoint, gin_files, bindings, search_paths, published).open()


def head_estimator(
  checkpoint: epath.PathLike | Checkpoint, classes: Any = None
) -> 'HeadClassifier':
  """The head of a training run as an estimator of its pre-logits, which `represent` writes.

  Args:
    checkpoint: as in `configuration`.
    classes: [K] names; None numbers them.

  Raises:
    ValueError: there is no checkpoint, or the head has settings that no estimator has.
  """
  from het_plugin.estimators import from_head  # needs scikit-learn

  run = open_run(checkpoint)
  return from_head(run.model.head, run.params['head'], classes)


def _published_bindings(checkpoint: Checkpoint, of_towers: bool, with_text: bool) -> list[str]:
  """Bindings from a file about its model: towers, or the width of a tanh layer before the head."""
  path = checkpoint.path
  arrays = checkpoint.arrays or {}
  found = []
  if of_towers and weights.is_tower(arrays):
    settings = weights.read_config(path)
    found = weights.read_tower(arrays, settings).bindings()
    if with_text:
      found += weights.read_text_tower(arrays, settings).bindings()
      tokenizer = epath.Path(weights.local(path)).parent / TOKENIZER
      found.append(f'train/DatasetConfig.vocabulary = {str(tokenizer)!r}')
  kernel = layouts.canonical(arrays).get('pre_logits/kernel')
  return found if kernel is None else [*found, f'vit.representation_size = {kernel.shape[1]}']


def _fit_mesh(bindings: Sequence[str]) -> None:
  """Reduces the mesh of the run if it does not fit the devices here, where it is not typed."""
  typed = [name for name in MESH if any(name in binding for binding in bindings)]
  num_devices = jax.device_count()
  num_replicas = _bound_size(_REPLICAS)
  if (model := _bound_size(_SUBMESH)) > 1 and _SUBMESH not in typed:
    if _PARTITIONS in typed or num_devices % (num_replicas * model):  # num_partitions replaces it
      gin.bind_parameter(_SUBMESH, None)
      if _PARTITIONS not in typed:
        gin.bind_parameter(_PARTITIONS, model)
  bound = {_REPLICAS: num_replicas, _PARTITIONS: _bound_size(_PARTITIONS)}
  sizes = dict(bound)
  slices = len({getattr(device, 'slice_index', 0) for device in jax.devices()})
  if num_devices % math.prod(sizes.values()) and _REPLICAS not in typed:
    sizes[_REPLICAS] = math.gcd(sizes[_REPLICAS], slices)
  if _PARTITIONS not in typed:
    sizes[_PARTITIONS] = math.gcd(sizes[_PARTITIONS], num_devices // sizes[_REPLICAS])
  for name, here in sizes.items():
    if here != bound[name]:
      _log.info('%s = %d for the devices here (%d); the run has %d', name, here,
                num_devices, bound[name])  # fmt: skip
      gin.bind_parameter(name, here)


def _bound_size(name: str) -> int:
  """The size of an axis of the mesh, or of a tile; 1 if it is not bound, or not to numbers."""
  try:
    size = gin.query_parameter(name)
  except ValueError:
    return 1
  if isinstance(size, (list, tuple)):
    size = math.prod(size)
  return size if isinstance(size, int) and size > 0 else 1


def initial_variables(model: Any, lengths: Mapping[str, int], channels: int) -> PyTree:
  """Variables of a model for images, and texts, of the lengths of a data set."""
  shapes = {'image': (1, lengths['image'], lengths['image'], channels)}
  if 'text' in lengths:
    shapes['text'] = (1, lengths['text'])
  return model.get_initial_variables(jax.random.key(0), shapes)
