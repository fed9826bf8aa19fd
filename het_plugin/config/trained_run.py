"""Opens a training run for evaluation: its model and parameters, on a mesh of the devices here.

    run = trained_run.open_run('runs/het_xl')
    run.model.representations(run.params, batch, ('pre_logits',))

A checkpoint is a run's directory (its newest checkpoint), one checkpoint in it
(runs/het_xl/checkpoint_400) or a published file (.npz, .safetensors), whose model gin files
describe unless it is a tower of timm, transformers or open_clip. The imports of a run's
configuration are limited (`foreign`).
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import traverse_util

import gin
from het_plugin import weights
from het_plugin.config import changes, foreign, parsing, registry
from het_plugin.weights import layouts

_log = logging.getLogger(__name__)

PyTree = Any

# Frames of a published file's model: its image tower, or both towers.
PUBLISHED = 'het_plugin/gin/evaluation/published.gin'
PUBLISHED_PAIRS = 'het_plugin/gin/evaluation/published_pairs.gin'
TOKENIZER = 'tokenizer.json'  # beside the file
_CHANNELS = (3, 1)
_PARTITIONS = 'PjitPartitioner.num_partitions'
GinSettings = tuple[Sequence[str], Sequence[str], Sequence[str]]  # files, bindings, search paths
# For the schedule, which is not used here: its length may depend on data that are not here.
_ANY_STEPS = 10**9


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedRun:
  """A model and its parameters, placed on the mesh of the configuration over the devices here.

  Attributes:
    checkpoint: the checkpoint's directory, or the published file, without step and task.
    param_specs: PartitionSpecs in the tree of the parameters.
    image_size: side of the square images in the configuration, in pixels.
    channels: channels of the images that the parameters are for.
    max_labels: labels per image in the configuration; 1 for captions.
    task: the task that it was trained on.
    class_names: names of its K classes; None if the run's directory has none.
    config: the configuration as gin text.
    max_corrupt_fraction: that of the training data; None for the default.
  """

  checkpoint: str
  step: int | None
  model: Any
  partitioner: Any
  params: PyTree
  param_specs: PyTree
  image_size: int
  channels: int
  max_labels: int
  task: str | None
  class_names: tuple[str, ...] | None
  config: str
  max_corrupt_fraction: float | None = None


def parse_run_config(
  checkpoint: epath.PathLike,
  gin_files: Sequence[str] = (),
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = ('.',),
  *,
  without: Sequence[str] = (),
  published: str = PUBLISHED,
  arrays: Mapping[str, np.ndarray] | None = None,
) -> Mapping[str, Any]:
  """Parses the gin configuration of a run, and returns the arguments of its `train`.

  Args:
    checkpoint, gin_files, bindings, search_paths, published: as in `open_run`.
    without: arguments to leave out, besides the actions and the checkpoints.
    arrays: the content of a published file; None reads it.

  Raises:
    ValueError: there is no configuration beside the checkpoint, or it lacks something.
  """
  registry.register_trainer()  # first, because it hides the output of TensorFlow's import
  from het_plugin.training import checkpoint_reader, train

  if weights.is_weights_file(checkpoint):
    frame = published
    arrays = weights.read_arrays(checkpoint) if arrays is None else arrays
    found = _published_bindings(checkpoint, arrays, not gin_files, frame == PUBLISHED_PAIRS)
    bindings = [*found, *bindings]
  else:
    found = checkpoint_reader.find(checkpoint)
    frame = changes.config_file(found, checkpoint_reader.step_of(found))
    if not frame.exists():
      raise ValueError(f'{checkpoint} has no configuration: {frame} does not exist')
    foreign.check(frame.read_text(), str(frame))
  parsing.parse_config([str(frame), *gin_files], bindings, search_paths)
  _fit_mesh(bindings)
  with gin.unlock_config():
    gin.parse_config([f'train.{x} = None' for x in ('actions', 'checkpoint_cfg', *without)])
    gin.parse_config(f'TOTAL_STEPS = {_ANY_STEPS}')
  settings = gin.get_bindings(train.train)
  for name in {'model', 'partitioner', 'train_dataset_cfg'} - set(without):
    if settings.get(name) is None:
      raise ValueError(f'train.{name} is not set in the configuration of {checkpoint}')
  return settings


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
  """Reduces the number of partitions if the mesh of the run does not fit the devices here."""
  try:
    wanted = gin.query_parameter(_PARTITIONS)
  except ValueError:  # not bound
    return
  if not isinstance(wanted, int) or any(_PARTITIONS in binding for binding in bindings):
    return
  here = math.gcd(wanted, jax.device_count())
  if here != wanted:
    _log.info('%s = %d for the devices here (%d); the run has %d', _PARTITIONS, here,
              jax.device_count(), wanted)  # fmt: skip
    with gin.unlock_config():
      gin.bind_parameter(_PARTITIONS, here)


def open_run(
  checkpoint: epath.PathLike,
  gin_files: Sequence[str] = (),
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = ('.',),
  published: str = PUBLISHED,
) -> TrainedRun:
  """Opens a checkpoint and leaves the gin configuration as that of the run; collective.

  Args:
    checkpoint: see the module docstring.
    gin_files: read after the run's config.gin. A published file needs those of its model, except
      for a tower of timm, transformers or open_clip.
    bindings: gin bindings that override everything else, such as
      'PjitPartitioner.num_partitions = 1'.
    search_paths: folders in which gin files are looked for.
    published: the frame of a published file, `PUBLISHED` or `PUBLISHED_PAIRS`.

  Raises:
    ValueError: there is no checkpoint, its configuration lacks a model, or its parameters do not
      fit the model.
  """
  arrays = weights.read_arrays(checkpoint) if weights.is_weights_file(checkpoint) else None
  settings = parse_run_config(
    checkpoint, gin_files, bindings, search_paths, published=published, arrays=arrays
  )
  from het_plugin.training import (
    checkpoint_reader,
    checkpoints,
    class_names,
    optimizers,
    warm_start,
  )

  config = gin.config_str()
  model, partitioner = settings['model'], settings['partitioner']
  dataset = settings['train_dataset_cfg']
  lengths = dataset.task_feature_lengths
  if arrays is not None:
    step, task = None, None
  else:
    checkpoint = checkpoint_reader.find(checkpoint)
    step = checkpoint_reader.step_of(checkpoint)
    task = dataset.mixture_or_task_name
  restore = checkpoints.RestoreCheckpointConfig(
    str(checkpoint),
    mode='specific',
    head='init',
    ema=optimizers.evaluates_ema(model.optimizer_def),
  )
  errors = []
  for channels in _channels(checkpoint, step, functools.partial(initial_variables, model, lengths)):
    init = functools.partial(initial_variables, model, lengths, channels)
    specs, target = _placement(model, partitioner, init)
    try:
      params = warm_start.restore_params(restore, target, arrays)
      break
    except ValueError as error:
      errors.append(error)
  else:
    raise min(errors, key=lambda error: len(str(error)))  # with the right channels it is shortest
  if arrays is not None:  # the file has no head for the model, and perhaps not all of the rest
    fresh = partitioner.partition(lambda: init()['params'], (), specs)()
    params = traverse_util.flatten_dict(fresh, sep='/') | params
  return TrainedRun(
    checkpoint=str(checkpoint),
    step=step,
    model=model,
    partitioner=partitioner,
    params=traverse_util.unflatten_dict(params, sep='/'),
    param_specs=specs,
    image_size=lengths['image'],
    channels=channels,
    max_labels=lengths.get('label', 1),
    task=task,
    class_names=None if arrays is not None else class_names.read(checkpoint),
    config=config,
    max_corrupt_fraction=getattr(dataset, 'max_corrupt_fraction', None),
  )


def read_params(
  checkpoint: epath.PathLike, *gin_settings: Sequence[str]
) -> tuple[Any, dict[str, np.ndarray]]:
  """The model of a run, and {name: array} of the parameters that it is evaluated with, on the host:
  their average where `with_ema` says so. Arguments as in `open_run`.
  """
  from het_plugin.training import checkpoint_reader, optimizers

  # The partitioner is of the devices that it trained on.
  model = parse_run_config(checkpoint, *gin_settings, without=['partitioner'])['model']
  ema = optimizers.evaluates_ema(model.optimizer_def)
  return model, checkpoint_reader.read_params(checkpoint, ema)


def published_params(
  checkpoint: epath.PathLike, *gin_settings: Sequence[str]
) -> dict[str, np.ndarray]:
  """`read_params` under the names of published files, see `weights.export_params`. Of a contrastive
  model it is the image tower, for which there are such names.
  """
  model, params = read_params(checkpoint, *gin_settings)
  num_classes = getattr(model.head, 'num_classes', None)
  if num_classes is None:
    params = {name: x for name, x in params.items() if name.startswith('backbone/')}
  return weights.export_params(params, num_classes or 1, getattr(model.backbone, 'num_heads', 1))


def initial_variables(model: Any, lengths: Mapping[str, int], channels: int) -> PyTree:
  """Variables of a model for images, and texts, of the lengths of a data set."""
  shapes = {'image': (1, lengths['image'], lengths['image'], channels)}
  if 'text' in lengths:
    shapes['text'] = (1, lengths['text'])
  return model.get_initial_variables(jax.random.key(0), shapes)


def _channels(
  checkpoint: epath.PathLike, step: int | None, init: Callable[[int], PyTree]
) -> tuple[int, ...]:
  """Channels to try: the usual ones, then those that the shapes of a run's parameters suggest."""
  from het_plugin.training import checkpoint_reader

  if step is None:
    return _CHANNELS
  saved, c = checkpoint_reader.params_shapes(checkpoint), _CHANNELS[0]
  usual = jax.eval_shape(lambda: init(c)['params'])
  usual = {name: x.shape for name, x in traverse_util.flatten_dict(usual, sep='/').items()}
  pairs = (p for name in saved.keys() & usual for p in zip(saved[name], usual[name], strict=False))
  found = {c * a // b for a, b in pairs if a != b and c * a % b == 0}
  return *_CHANNELS, *sorted(found - set(_CHANNELS))


def _placement(model: Any, partitioner: Any, init: Callable[[], PyTree]) -> tuple[PyTree, PyTree]:
  """PartitionSpecs, and shapes with shardings, of the parameters."""
  from het_plugin.training import initial_state
  from het_plugin.training import state as state_lib

  axes, state = initial_state.placed(
    lambda: state_lib.TrainState.create(model.optimizer_def, init()), partitioner
  )
  return axes.params, state.params
