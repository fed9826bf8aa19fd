"""A model with parameters on a mesh, and the rows that it computes."""

import contextlib
import dataclasses
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from het_plugin import data
from het_plugin.rows import Rows, layer_of, of_batch, ordered
from het_plugin.runs.per_example import (
  KEPT,
  Batches,
  Columns,
  Compute,
  PerExample,
  as_rows,
  check_channels,
  in_chunks,
)
from het_plugin.system import checksum
from het_plugin.training import checkpoint_reader
from het_plugin.training.partitioning import PjitPartitioner

if TYPE_CHECKING:
  from het_plugin.data import preprocess

PyTree = Any
TEST_SPLITS = ('test', 'validation')


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """A model and its parameters, placed on a mesh.

  `opening.open_run` opens one from files. During a training, `dataclasses.replace` makes one of the
  current parameters, which shares the compiled functions of the others.

      >>> import jax, numpy as np
      >>> from het_plugin import backbones, heads, integrate, models, runs
      >>> from het_plugin.training.partitioning import PjitPartitioner
      >>> head, rule = heads.Det(num_classes=3), integrate.Integrator()
      >>> model = models.ClassificationModel(backbones.Mlp((8,)), head, None, rule, rule)
      >>> params = model.get_initial_variables(jax.random.key(0), {'image': (2, 1, 1, 4)})['params']
      >>> run = runs.Run(model, PjitPartitioner(), params, None, image_size=1, channels=4)
      >>> run.predict({'image': np.ones((2, 1, 1, 4), np.float32)})['log_prob'].shape
      (2, 3)

  Attributes:
    model: has `representations(params, batch, layers)`, and for `predict` also
      `predictive(params, batch)` and `head.link`.
    partitioner: places arrays on the mesh.
    params: tree of arrays, placed by param_specs.
    param_specs: PartitionSpecs in the tree of the parameters.
    image_size: side in pixels of the square images that the model takes.
    channels: channels of these images.
    max_labels: largest number of labels per image in the configuration; 1 for captions.
    task: the task that it was trained on.
    class_names: names of its K classes; None if they are not known.
    checkpoint: the checkpoint's directory, or the published file, without step and task.
    step: the step of the parameters.
    config: the configuration (`opening.Configuration`); None for a run in training.
    max_corrupt_fraction: as in DatasetConfig, for the training data; None for the default.
    resize: as in DatasetConfig, of the evaluation in training; for other splits of this task, and a
      ResizeAndCrop, which belongs to a tower, for all tasks.
  """

  model: Any
  partitioner: PjitPartitioner
  params: PyTree
  param_specs: PyTree
  image_size: int
  channels: int
  max_labels: int = 1
  task: str | None = None
  class_names: tuple[str, ...] | None = None
  checkpoint: str = ''
  step: int | None = None
  config: Any = None
  max_corrupt_fraction: float | None = None
  resize: "Literal['aspect', 'squash'] | preprocess.ResizeAndCrop | None" = None
  _compiled: dict[Hashable, PerExample] = dataclasses.field(default_factory=dict, repr=False)

  @property
  def reads_sheets(self) -> bool:
    """Whether images are sheets of patches of pictures of any aspect (`backbones.naflex`)."""
    return getattr(self.resize, 'mode', None) == 'patches'

  def predict(self, batch: Mapping[str, np.ndarray]) -> Columns:
    """The predictive distribution of each example, by the model's evaluation integrator.

    Args:
      batch: image float32 [B, H, W, C] with values in [-1, 1]. Other features are optional: label,
        index, by which noise is drawn, and mask.

    Returns:
      'log_prob' float32 [B, K] and the other columns of `model.predictive`: 'expected_entropy' [B]
      in nats of a head with noise, 'nll' [B] in nats of a sigmoid and given labels.

    Raises:
      ValueError: the backbone is a NaFlex, and an image is no sheet.
    """
    return self._of_batch('predict', self.model.predictive, batch)

  def represent(
    self, batch: Mapping[str, np.ndarray], layers: Sequence[str] = ('pre_logits',)
  ) -> Columns:
    """{layer: [B, ...]}, the representations of a batch, which is as for `predict`.

    Raises:
      ValueError: the backbone has no layer of that name, or as for `predict`.
    """
    layers = tuple(layers)

    def compute(params: PyTree, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
      return self.model.representations(params, batch, layers)

    return self._of_batch(('represent', layers), compute, batch)

  def rows(
    self,
    split: str,
    columns: Sequence[str] = ('features',),
    *,
    task: str | None = None,
    batch_size: int = 256,
    max_examples: int | None = None,
    pool: str = 'mean',
    **settings: Any,
  ) -> Rows:
    """The rows of a split in memory, ascending by example id; every process calls it.

    Args:
      split: a split, or a slice of one.
      columns: 'log_prob', which brings the other columns of the predictive distribution;
        'location_top', the class with the largest location, int32 [N]; 'features', the pre-logits;
        `rows.column(layer)`, another layer.
      task: None for what the run trained on.
      batch_size: rows of the global batch.
      max_examples: a fixed random choice of so many; None for all.
      pool: see `per_example.as_rows`.
      **settings: others of `open_split`.
    """
    settings |= {'task': task, 'batch_size': batch_size}
    with self.open_split(split, max_examples, **settings) as (batches, _):
      return ordered(list(self.stream(batches, columns, batch_size, max_examples, pool=pool)))

  def stream(
    self,
    batches: Batches,
    columns: Sequence[str],
    batch_size: int,
    max_examples: int | None = None,
    *,
    pool: str = 'mean',
  ) -> Iterator[Rows]:
    """The rows of each batch that has any; arguments as in `rows` and `PerExample.__call__`."""
    compute = self.computing(columns, pool=pool)
    link = 'softmax'
    if 'log_prob' in columns:
      link = self.model.head.link
    for found in compute(self.params, batches, batch_size, max_examples):
      if len(found['index']):
        yield of_batch(found, link)

  def computing(
    self,
    columns: Sequence[str],
    *,
    pool: str = 'mean',
    dtype: Any = jnp.float32,
    is_shared: bool = False,
  ) -> PerExample:
    """A function of batches that computes columns (see `rows`), all in one forward pass.

    The columns of layers are [n, D] in `dtype`; they are pooled in float32 first. `is_shared` is
    that of `PerExample`.
    """
    columns = tuple(columns)
    dtype = jnp.dtype(dtype)
    of_head = 'log_prob', 'location_top'
    layers = {layer_of(name): name for name in columns if name not in of_head}

    def compute(params: PyTree, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
      found = {}
      if layers:
        outputs = self.model.representations(params, batch, tuple(layers))
        found = {layers[x]: as_rows(y, pool).astype(dtype) for x, y in outputs.items()}
      if 'location_top' in columns:  # the same forward pass once it is compiled
        found['location_top'] = self.model.location_top(params, batch)
      # Classes are sharded until the log-probabilities of a batch are gathered.
      return found | (self.model.predictive(params, batch) if 'log_prob' in columns else {})

    # Draws of a batch need the whole batch; layers of an image need the image alone.
    has_head = len(layers) < len(columns)
    key = columns, pool, dtype, is_shared
    return self.per_example(key, compute if has_head else in_chunks(compute), is_shared=is_shared)

  def per_example(
    self,
    key: Hashable,
    compute: Compute,
    specs: PyTree | None = None,
    is_shared: bool = False,
  ) -> PerExample:
    """A function of batches on the mesh of this run; made and compiled once for each key.

    `specs` are the PartitionSpecs of its first argument, by default those of the parameters.
    """
    if key not in self._compiled:
      specs = self.param_specs if specs is None else specs
      # References that the model calls later, such as @norm without (), find their bindings.
      active = contextlib.nullcontext if self.config is None else self.config.active
      of_run = self.partitioner, specs, self.channels, active
      compiled = PerExample(compute, *of_run, is_shared)
      self._compiled[key] = compiled
    return self._compiled[key]

  @contextlib.contextmanager
  def open_split(
    self,
    split: str,
    max_examples: int | None = None,
    *,
    task: str | None = None,
    name: str | None = None,
    bound: str = 'max_examples',
    whole: bool = False,
    **settings: Any,
  ) -> Generator[tuple['data.BatchIterator', int]]:
    """Opens a split and closes it at the end of the block; reads no image yet.

    Args:
      split: what is read.
      max_examples: largest number of examples that will be read; None for all.
      task: whose split it is; None for what the run trained on.
      name, bound: the split, and the setting that limits its examples, for the error.
      whole: reads all rows of each batch on every process, not only those that it feeds.
      **settings: batch_size and others of `data.one_pass`. By default images have the size of the
        run's, and labels are as many as the task has.

    Yields:
      The batches, and their number of examples, at most `max_examples`.
    """
    task = task or self.task or ''
    info = data.task_info(task)
    check_channels(info.channels, self.channels)
    max_labels = getattr(info, 'max_labels', None)  # captions have none
    if max_labels and getattr(info, 'multi_label', False):  # the configuration may know more
      max_labels = max(max_labels, self.max_labels)
    of_run = {x: getattr(self, x) for x in ('image_size', 'max_corrupt_fraction')}
    of_task = isinstance(self.resize, str)
    of_run['resize'] = None if of_task and task != self.task else self.resize
    if settings.get('resize') is None:
      settings.pop('resize', None)
    settings = of_run | {'max_labels': max_labels} | settings
    data.preprocess.check_images(settings['resize'], self.model, self.checkpoint)
    config = data.one_pass(task, split, bounded=max_examples is not None, **settings)
    rows = None if whole else self.partitioner.batch_rows(config.batch_size)
    with contextlib.closing(data.get_dataset(config, rows)) as batches:
      sizes = [size for size in (batches.num_examples, max_examples) if size is not None]
      if not sizes:
        raise ValueError(f'{name or f"split {split!r} of {task!r}"} is endless: set {bound}')
      yield batches, min(sizes)

  def _of_batch(self, key, compute, batch):
    data.preprocess.check_sheets(batch['image'], self.model, self.checkpoint)
    size = len(batch['image'])
    padding = -size % self.partitioner.data_shards  # a mesh takes whole numbers of rows per device
    unlabelled = np.full((size, self.max_labels), -1, np.int32)
    index = np.arange(size, dtype=np.int32)
    mask = np.ones(size, np.float32)
    whole = {'label': unlabelled, 'index': index, 'mask': mask, **batch}
    whole = {
      name: np.pad(x, [(0, padding)] + [(0, 0)] * (np.ndim(x) - 1)) for name, x in whole.items()
    }
    rows = self.partitioner.batch_rows(size + padding)
    own = {name: x[rows] for name, x in whole.items()}
    (columns,) = self.per_example(key, compute)(self.params, [own], size + padding)
    given = {*KEPT, *(() if 'label' in batch else ('nll',))}
    return {name: x for name, x in columns.items() if name not in given}


def default_split(task: str) -> str:
  """The split of a task to evaluate on: the first of `TEST_SPLITS` that it has, else ValueError."""
  splits = data.task_info(task).splits
  if not (usual := [split for split in TEST_SPLITS if split in splits]):
    raise ValueError(f'--split is needed: {task} has {", ".join(sorted(splits))}')
  return usual[0]


def params_fingerprint(params: PyTree) -> str:
  """16 hex digits of the names, types, shapes and bits of parameters; every process calls it.

  It does not depend on the mesh (`checksum.array_checksums`).
  """
  named = checkpoint_reader.named(params)
  sums = checksum.array_checksums(named)
  described = {name: [str(x.dtype), x.shape, sums[name]] for name, x in named.items()}
  return checksum.json_digest(described)[:16]
