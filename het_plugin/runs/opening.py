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
import functools
import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import traverse_util

import gin
from het_plugin import weights
from het_plugin.config import changes, foreign, gin_state, parsing, registry, uses
from het_plugin.runs.run import Run
from het_plugin.weights import layouts

_log = logging.getLogger(__name__)

PyTree = Any

# Frames of a published file's model: its image tower, or both towers.
PUBLISHED = 'het_plugin/gin/evaluation/published.gin'
PUBLISHED_PAIRS = 'het_plugin/gin/evaluation/published_pairs.gin'
TOKENIZER = 'tokenizer.json'  # beside the file
_CHANNELS = (3, 1)
_PARTITIONS = 'PjitPartitioner.num_partitions'
_REPLICAS = 'PjitPartitioner.num_replicas'
_SUBMESH = 'PjitPartitioner.model_parallel_submesh'
MESH = (_REPLICAS, _PARTITIONS, _SUBMESH)  # what is fitted to the devices here
_READ = ('FewShotAction', 'ZeroShotAction')  # configurables that mains read beside `train`
_NEEDED = ('model', 'partitioner', 'train_dataset_cfg')
GinSettings = tuple[Sequence[str], Sequence[str], Sequence[str]]  # files, bindings, search paths
# For the schedule, which is not used here: its length may depend on data that are not here.
_ANY_STEPS = 10**9


class Configuration:
  """The configuration of a trained run, and where its parameters are.

  Attributes:
    checkpoint: the checkpoint's directory, or the published file.
    step: the step of the checkpoint; None for a published file.
    text: the configuration as gin text.
  """

  def __init__(self, checkpoint: str, step: int | None, arrays: Mapping[str, np.ndarray] | None):
    """Takes gin's current configuration. `arrays` are the content of a published file."""
    self.checkpoint = checkpoint
    self.step = step
    self.text = gin.config_str()
    self._state = gin_state.capture()
    self._arrays = arrays
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
    return None if self.step is None else self.argument('train_dataset_cfg').mixture_or_task_name

  @property
  def class_names(self) -> tuple[str, ...] | None:
    """The names of the classes that the run trained on; None where they were not kept.

    Raises:
      ValueError: the file of names is damaged, or has another number of them than the head.
    """
    from het_plugin.training import class_names

    if self.step is None:
      return None
    names = class_names.read(self.checkpoint)
    num_classes = getattr(getattr(self.argument('model'), 'head', None), 'num_classes', None)
    if names and num_classes and len(names) != num_classes:
      raise ValueError(
        f'{class_names.FILE} beside {self.checkpoint} has {len(names)} names, and the head has '
        f'{num_classes} classes'
      )
    return names

  def read_params(self) -> dict[str, np.ndarray]:
    """{name: array} of the parameters that a run is evaluated with, float32 on the host.

    They are their average where `with_ema` says so.
    """
    from het_plugin.training import checkpoint_reader, optimizers

    ema = optimizers.evaluates_ema(self.argument('model').optimizer_def)
    return checkpoint_reader.read_params(self.checkpoint, ema)

  def published_params(self) -> dict[str, np.ndarray]:
    """`read_params` under the names of published files, see `weights.export_params`.

    Of a contrastive model it is the image tower, for which there are such names.
    """
    model = self.argument('model')
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
    bounds = {x: getattr(temperature, x, None) for x in ('tau', 'tau_min', 'tau_max')}
    return {
      'head': type(head).__name__,
      'link': getattr(head, 'link', None),
      'num_classes': getattr(head, 'num_classes', None),
      'temperature': {name: x for name, x in bounds.items() if x is not None},
      'class_names': self.class_names,
      'image_size': lengths['image'],
      'image_range': [-1, 1],
      'task': self.task,
      'checkpoint': self.checkpoint,
    }

  def open(self) -> Run:
    """The run on a mesh of the devices here; collective.

    Raises:
      ValueError: the parameters do not fit the model.
    """
    from het_plugin.training import checkpoints, optimizers, warm_start

    model = self.argument('model')
    partitioner = self.argument('partitioner')
    dataset = self.argument('train_dataset_cfg')
    lengths = dataset.task_feature_lengths
    is_run = self._arrays is None
    ema = is_run and optimizers.evaluates_ema(model.optimizer_def)
    head = 'keep' if is_run else 'init'  # a file has no head of this model
    restore = checkpoints.RestoreCheckpointConfig(
      self.checkpoint, mode='specific', head=head, ema=ema
    )
    errors = []
    to_try = [_CHANNELS[0]]
    while to_try:
      channels = to_try.pop(0)
      init = functools.partial(initial_variables, model, lengths, channels)
      specs, target = _placement(model, partitioner, init)
      try:
        params = warm_start.restore_params(restore, target, self._arrays, model)
        break
      except ValueError as error:
        if not errors:
          to_try += self._other_channels(target)
        errors.append(error)
    else:
      raise min(errors, key=lambda error: len(str(error)))  # with the right channels it is shortest
    if self._arrays is not None:  # the file has no head for the model, and perhaps not all the rest
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
      checkpoint=self.checkpoint,
      step=self.step,
      config=self,
      max_corrupt_fraction=getattr(dataset, 'max_corrupt_fraction', None),
      resize=getattr(self.argument('train_eval_dataset_cfg'), 'resize', None),
    )

  def _other_channels(self, target: PyTree) -> tuple[int, ...]:
    """Channels to try if parameters of these shapes, for the usual ones, do not fit.

    First those that the shapes of a run's parameters suggest: each costs a trace of the model.
    """
    from het_plugin.training import checkpoint_reader

    usual, *others = _CHANNELS
    if self.step is None:
      return tuple(others)
    saved = checkpoint_reader.params_shapes(self.checkpoint)
    shapes = {name: x.shape for name, x in traverse_util.flatten_dict(target, sep='/').items()}
    pairs = [zip(saved[name], shapes[name], strict=False) for name in saved.keys() & shapes]
    found = {usual * a // b for pair in pairs for a, b in pair if a != b and usual * a % b == 0}
    return *sorted(found), *(c for c in others if c not in found)


def configuration(
  checkpoint: epath.PathLike,
  gin_files: Sequence[str] = (),
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = ('.',),
  published: str = PUBLISHED,
) -> Configuration:
  """Reads the configuration of a checkpoint.

  Args:
    checkpoint: see the module docstring.
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
    from het_plugin.training import checkpoint_reader, train

    step = arrays = None
    if weights.is_weights_file(checkpoint):
      frame = published
      arrays = weights.read_arrays(checkpoint)
      found = _published_bindings(checkpoint, arrays, not gin_files, frame == PUBLISHED_PAIRS)
      bindings = [*found, *bindings]
    else:
      checkpoint = checkpoint_reader.find(checkpoint)
      step = checkpoint_reader.step_of(checkpoint)
      frame = changes.config_file(checkpoint, step)
      if not frame.exists():
        raise ValueError(f'{checkpoint} has no configuration: {frame} does not exist')
      foreign.check(frame.read_text(), str(frame))
    parsing.parse_config([str(frame), *gin_files], bindings, search_paths)
    uses.check_typed(typed, [uses.of(gin.config_str(), called=_READ)])
    with gin.unlock_config():
      _fit_mesh(bindings)
      gin.parse_config([f'train.{name} = None' for name in ('actions', 'checkpoint_cfg')])
      gin.parse_config(f'TOTAL_STEPS = {_ANY_STEPS}')
    bound = gin.get_bindings(train.train, resolve_references=False)
    for name in _NEEDED:
      if bound.get(name) is None:
        raise ValueError(f'train.{name} is not set in the configuration of {checkpoint}')
    return Configuration(str(checkpoint), step, arrays)


def open_run(
  checkpoint: epath.PathLike,
  gin_files: Sequence[str] = (),
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = ('.',),
  published: str = PUBLISHED,
) -> Run:
  """Opens a checkpoint on a mesh of the devices here; collective.

  Args:
    checkpoint, gin_files, bindings, search_paths, published: see `configuration`.

  Returns:
    The run, with the parameters that it is evaluated with.

  Raises:
    ValueError: as in `configuration`, or the parameters do not fit the model.
  """
  return configuration(checkpoint, gin_files, bindings, search_paths, published).open()


def _published_bindings(
  path: epath.PathLike, arrays: Mapping[str, np.ndarray], of_towers: bool, with_text: bool
) -> list[str]:
  """Bindings from a file about its model: towers, or the width of a tanh layer before the head."""
  found = []
  if of_towers and weights.is_tower(arrays):
    settings = weights.read_config(path)
    found = weights.read_tower(arrays, settings).bindings()
    if with_text:
      found += weights.read_text_tower(arrays, settings).bindings()
      found.append(f'train/DatasetConfig.vocabulary = {str(epath.Path(path).parent / TOKENIZER)!r}')
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


def _placement(model: Any, partitioner: Any, init: Callable[[], PyTree]) -> tuple[PyTree, PyTree]:
  """PartitionSpecs, and shapes with shardings, of the parameters."""
  from het_plugin.training import initial_state
  from het_plugin.training import state as state_lib

  axes, state = initial_state.placed(
    lambda: state_lib.TrainState.create(model.optimizer_def, init()), partitioner
  )
  return axes.params, state.params
