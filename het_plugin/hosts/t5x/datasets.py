"""Our data sets for t5x, with the order, rows and position of our trainer.

t5x itself reads the same tasks through seqio. It has no position, so a resumed run would begin with
the first example again.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import clu.data.dataset_iterator
import jax
import numpy as np
from etils import epath

from het_plugin import data
from het_plugin.training import checkpoint_reader, class_names


class TrainIterator(clu.data.dataset_iterator.DatasetIterator):
  """Batches for t5x's loop. Its checkpoints hold the position of the next example."""

  def __init__(self, batches: data.BatchIterator, rows: int):
    self._batches = batches
    self._rows = rows

  @property
  def element_spec(self) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes of the rows of this process."""
    return local_spec(self._batches, self._rows)

  def __next__(self) -> Mapping[str, np.ndarray]:
    return next(self._batches)

  def reset(self) -> None:
    self._batches.set_state({'position': 0})

  def save(self, filename: epath.PathLike) -> None:
    epath.Path(filename).write_text(json.dumps(self._batches.get_state()))

  def restore(self, filename: epath.PathLike) -> None:
    path = epath.Path(filename)
    # t5x has already read the first batch when it saves this one.
    is_first = 'checkpoint_0' in path.parts
    self._batches.set_state({'position': 0} if is_first else json.loads(path.read_text()))

  def load(self, filename: epath.PathLike) -> None:
    self.restore(filename)


class EvalBatches:
  """The first batches of a data set, the same ones in every iteration."""

  def __init__(self, batches: data.BatchIterator, rows: int, max_batches: int):
    self._batches = batches
    self._rows = rows
    self._max_batches = max_batches

  @property
  def element_spec(self) -> Mapping[str, jax.ShapeDtypeStruct]:
    return local_spec(self._batches, self._rows)

  def __iter__(self) -> Iterator[Mapping[str, np.ndarray]]:
    self._batches.set_state({'position': 0})
    for _, batch in zip(range(self._max_batches), self._batches, strict=False):
      yield batch


def local_spec(batches: data.BatchIterator, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and types of the batches, with `rows` examples in each."""
  return {
    name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
    for name, x in batches.element_spec.items()
  }


def get_dataset(
  cfg: data.DatasetConfig,
  shard_id: int,
  num_shards: int,
  feature_converter_cls: Callable[..., Any],
  num_epochs: int | None = None,
  continue_from_last_checkpoint: bool = False,
  *,
  model: Any,
  model_dir: epath.PathLike,
) -> TrainIterator:
  """`train.get_dataset_fn` of t5x for our DatasetConfig.

  shard_id and num_shards give the part of the global batch for this process. The names of the
  classes are kept in model_dir, as by our trainer.

  Raises:
    ValueError: a setting of cfg is wrong, or it or the model does not fit the task, or the run in
      model_dir had other classes.
  """
  del feature_converter_cls, num_epochs, continue_from_last_checkpoint  # cfg has its own
  iterator = TrainIterator(*_open(cfg, shard_id, num_shards, model))
  names = getattr(data.task_info(cfg.mixture_or_task_name), 'class_names', None)
  kept = class_names.read(model_dir) if checkpoint_reader.steps(model_dir) else None
  class_names.check(f'mixture_or_task_name={cfg.mixture_or_task_name}', names, kept)
  if names and not kept and not jax.process_index():
    class_names.write(model_dir, names)
  return iterator


def get_eval_datasets(
  cfg: data.DatasetConfig,
  shard_id: int,
  num_shards: int,
  eval_steps: int,
  feature_converter_cls: Callable[..., Any],
  *,
  model: Any,
) -> dict[str, EvalBatches]:
  """`train.train_eval_get_dataset_fn` of t5x for our DatasetConfig; as `get_dataset`.

  The last batch of a data set that eval_steps exceed is padded with rows that do not count.
  """
  del feature_converter_cls
  batches, rows = _open(cfg, shard_id, num_shards, model)
  return {cfg.mixture_or_task_name: EvalBatches(batches, rows, eval_steps)}


def _open(
  cfg: data.DatasetConfig, shard_id: int, num_shards: int, model: Any
) -> tuple[data.BatchIterator, int]:
  if cfg.batch_size % num_shards:
    raise ValueError(
      f'batch_size={cfg.batch_size} must be a multiple of {num_shards}, the shards of the data.'
    )
  vocabulary = () if cfg.vocabulary is None else (cfg.vocabulary,)
  model.validate(data.task_info(cfg.mixture_or_task_name, *vocabulary))
  rows = cfg.batch_size // num_shards
  batches = data.get_dataset(cfg, np.arange(rows) + shard_id * rows)
  return batches, rows


def task_name(name: str) -> str:
  """seqio's name for a task with any of our names, such as 'image_folder:/data/birds'.

  Raises:
    ValueError: as `data.tasks.get_task`.
  """
  from het_plugin.data import seqio_task

  return seqio_task.register(name).name
