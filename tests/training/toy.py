"""A small model with t5x's surface and a data set with the BatchIterator contract, for the
trainer's tests."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics
from flax.linen import partitioning as flax_partitioning

from het_plugin.training import initial_state as initial_state_lib
from het_plugin.training import optimizers
from het_plugin.training.state import TrainState

SIDE = 4
NUM_CLASSES = 16
WIDTH = 32


class Mlp(nn.Module):
  """image [B, H, W, C] -> logits [B, K]: one hidden layer, dropout keyed by example, a
  temperature."""

  num_classes: int = NUM_CLASSES
  width: int = WIDTH

  @nn.compact
  def __call__(self, image: jax.Array, noise: jax.Array | None = None) -> jax.Array:
    x = image.reshape(image.shape[0], -1)  # [B, H * W * C]
    x = jnp.tanh(self._dense(x, 'hidden', self.width, (None, 'embed')))  # [B, D]
    x = flax_partitioning.with_sharding_constraint(x, ('batch', 'embed'))
    if noise is not None:
      x = x + noise
    x = self._dense(x, 'head', self.num_classes, ('embed', 'vocab'))  # [B, K]
    t = flax_partitioning.param_with_axes('temperature', nn.initializers.zeros, (), axes=())
    return x / (1.0 + jax.nn.sigmoid(t))

  def _dense(self, x: jax.Array, name: str, features: int, axes: tuple) -> jax.Array:
    kernel = flax_partitioning.param_with_axes(
      f'{name}_kernel', nn.initializers.lecun_normal(), (x.shape[-1], features), axes=axes
    )
    bias = flax_partitioning.param_with_axes(
      f'{name}_bias', nn.initializers.zeros, (features,), axes=axes[1:]
    )
    return x @ kernel + bias


class ToyModel:
  """Softmax classification; the noise on the hidden layer is keyed by batch['index'], as the
  contract asks."""

  def __init__(
    self,
    module: nn.Module | None = None,
    optimizer_def: optimizers.OptaxWrapper | None = None,
    loss_normalizing_factor: float | None = None,
  ):
    self.module = Mlp() if module is None else module
    self.optimizer_def = optimizer_def or optimizers.adamw(
      1e-2, weight_decay=1e-2, weight_decay_params='_kernel$', clip_norm=1.0
    )
    self.loss_normalizing_factor = loss_normalizing_factor

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    del input_types
    return self.module.init(rng, jnp.zeros(input_shapes['image'], jnp.float32))

  def loss_fn(self, params, batch, dropout_rng):
    keys = jax.vmap(lambda i: jax.random.fold_in(dropout_rng, i))(batch['index'])
    noise = 0.1 * jax.vmap(lambda key: jax.random.normal(key, (self.module.width,)))(keys)
    return self._loss(params, batch, noise)

  def eval_fn(self, params, batch):
    return self._loss(params, batch, None)

  def _loss(self, params, batch, noise):
    logits = self.module.apply({'params': params}, batch['image'], noise)  # [B, K]
    label = batch['label'][:, 0]
    mask = batch['mask']
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], axis=1)[:, 0]  # [B]
    metrics = {
      'loss': _average(nll, mask),
      'precision_at_1': _average((jnp.argmax(logits, -1) == label).astype(jnp.float32), mask),
    }
    total = jnp.sum(nll * mask)
    factor = self.loss_normalizing_factor
    return total / (jnp.maximum(mask.sum(), 1.0) if factor is None else factor), metrics


def _average(value: jax.Array, mask: jax.Array) -> clu_metrics.Average:
  return clu_metrics.Average.from_model_output(value, mask=mask.astype(bool))


@dataclasses.dataclass(frozen=True)
class ToyDatasetConfig:
  """num_examples None: endless. The last batch of a finite one is padded. The images of `nan_rows`,
  places in the global order, are NaN.
  """

  batch_size: int
  mixture_or_task_name: str = 'toy'
  num_examples: int | None = None
  nan_rows: tuple[int, ...] = ()
  split: str = 'train'  # which is not looked at


class ToyIterator:
  """Examples are functions of their global index; the label can be told from the image."""

  def __init__(self, cfg: ToyDatasetConfig, rows: np.ndarray | None = None):
    self._cfg = cfg
    self._rows = np.arange(cfg.batch_size) if rows is None else rows
    self._position = 0
    size = cfg.batch_size
    n = cfg.num_examples
    self.num_examples = n
    self.num_batches = None if n is None else -(-n // size)
    self.element_spec = {
      'image': jax.ShapeDtypeStruct((size, SIDE, SIDE, 1), np.float32),
      'label': jax.ShapeDtypeStruct((size, 1), np.int32),
      'index': jax.ShapeDtypeStruct((size,), np.int32),
      'mask': jax.ShapeDtypeStruct((size,), np.float32),
    }

  def __iter__(self):
    return self

  def __next__(self):
    if self.num_batches is not None and self._position >= self.num_batches * self._cfg.batch_size:
      raise StopIteration
    index = self._position + self._rows
    self._position += self._cfg.batch_size
    end = np.inf if self._cfg.num_examples is None else self._cfg.num_examples
    batch = make_batch(index, index < end)
    batch['image'][np.isin(index, self._cfg.nan_rows)] = np.nan
    return batch

  def get_state(self):
    return {'position': self._position}

  def set_state(self, state):
    self._position = state['position']


def make_batch(index: np.ndarray, real: np.ndarray) -> dict[str, np.ndarray]:
  """Rows [B] of the global order; rows that are not real are all zero."""
  image = np.stack([np.random.default_rng(int(i)).uniform(-1, 1, (SIDE, SIDE, 1)) for i in index])
  projection = np.random.default_rng(7).normal(size=(SIDE**2, NUM_CLASSES))
  scores = image.reshape(len(index), -1) @ projection  # [B, K]
  real = real.astype(np.float32)
  return {
    'image': (image * real[:, None, None, None]).astype(np.float32),
    'label': np.where(real, scores.argmax(-1), 0).astype(np.int32)[:, None],
    'index': index.astype(np.int32),
    'mask': real,
  }


def get_dataset(cfg: ToyDatasetConfig, rows: np.ndarray | None = None) -> ToyIterator:
  return ToyIterator(cfg, rows)


def placed_state(model, partitioner, key):
  """(PartitionSpecs, shapes with shardings) of the initial state of a model."""
  return initial_state_lib.placed(_init(model, key), partitioner)


def initial_state(model, partitioner, key):
  """(PartitionSpecs, placed initial state) of a model."""
  init = _init(model, key)
  axes = partitioner.get_mesh_axes(jax.eval_shape(init))
  return axes, partitioner.partition(init, (), axes)()


def _init(model, key):
  def init():
    variables = model.get_initial_variables(key, {'image': (8, SIDE, SIDE, 1)})
    return TrainState.create(model.optimizer_def, variables)

  return init
