"""Trains the temperature on the loss of held-out rows (Collier et al., 2023, appendix G.2).

Let theta be all parameters except t, tau = tau(t), L the loss of the training rows, V the loss of
the held-out rows and s the learning rate of the step. theta is trained on L with its own optimizer.
t is trained with one of two derivatives:

  'luketina'  dV/dt after one step theta'(t) = theta - s L_theta(theta, t):
              d/dt V(theta'(t), t) = V_t(theta', t) - s < V_theta(theta', t), L_theta,t(theta, t) >
  'simple'    V_t(theta, t), which ignores that theta depends on t

The mixed derivative L_theta,t is exact: one forward-mode pass through the gradient. As in Luketina
et al. (2016, https://arxiv.org/abs/1511.06727, section 2.1), theta' is a step of plain SGD without
momentum, clipping or weight decay, whichever optimizer trains theta.

The last of every n rows of a batch is held out, so every device has the same share of them on any
mesh. They are a share of the batch, or come from a second data set.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from flax.linen import partitioning as flax_partitioning
from jax import lax

import gin
from het_plugin import data
from het_plugin.training import optimizers, partitioning
from het_plugin.training import step as step_lib
from het_plugin.training.state import TrainState

Batch = step_lib.Batch
Metrics = step_lib.Metrics
PyTree = Any

LUKETINA = 'luketina'
SIMPLE = 'simple'


def temperature_optimizer(
  optimizer_def: optimizers.OptaxWrapper,
  learning_rate: Annotated[float, '[0, inf)'] | optax.Schedule | None = None,
) -> optimizers.OptaxWrapper:
  """Trains t with a separate Adam, outside the moments and the clipping of the other parameters.

  A learning rate of 0 keeps t constant. None uses the learning rate of `optimizer_def`, the
  optimizer of the others. At initialisation, the model must have one learned temperature.
  """
  if learning_rate is None and (learning_rate := optimizer_def.learning_rate_fn) is None:
    raise ValueError(
      'temperature_optimizer.learning_rate=None needs an optimizer_def with a learning_rate_fn: '
      'give a number.'
    )

  def labels(params: PyTree) -> PyTree:
    path = _temperature_path(params)
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({p: 'temperature' if p == path else 'others' for p in flat})

  parts = {'others': optimizer_def.optax_optimizer, 'temperature': optax.adam(learning_rate)}
  if optimizer_def.evaluates_ema:
    raise ValueError(
      'temperature_optimizer.optimizer_def=@with_ema() would leave the temperature out of the '
      'average: set with_ema.optimizer_def = @temperature_optimizer().'
    )
  return dataclasses.replace(optimizer_def, optax_optimizer=optax.partition(parts, labels))


def _temperature_path(params: PyTree) -> tuple[str, ...]:
  found = [path for path in traverse_util.flatten_dict(params) if path[-1] == 't']
  if len(found) != 1:
    names = ', '.join('/'.join(path) for path in found) or 'none'
    raise ValueError(
      f'The model has {len(found)} learned temperatures ({names}); there must be one: bind '
      "LearnedTemperature to the head's temperature."
    )
  return found[0]


def gradients(
  train_loss: Callable[[PyTree, jax.Array], tuple[jax.Array, Any]],
  held_out_loss: Callable[[PyTree, jax.Array], tuple[jax.Array, Any]],
  theta: PyTree,
  t: jax.Array,
  step_size: jax.Array | float | None,
) -> tuple[PyTree, jax.Array, Any, Any]:
  """The gradient of L with respect to theta, and the derivative of V with respect to t.

  The losses L and V are (theta, t) -> (scalar, auxiliary output), for any tree theta and a scalar
  t. `step_size` is s of 'luketina', None for 'simple'. The last two results are the auxiliary
  outputs of L and V.
  """
  if step_size is None:
    grads, aux = jax.grad(train_loss, has_aux=True)(theta, t)
    v_t, held_out_aux = jax.grad(held_out_loss, argnums=1, has_aux=True)(theta, t)
    return grads, v_t, aux, held_out_aux

  def gradient(t: jax.Array) -> tuple[PyTree, Any]:
    return jax.grad(train_loss, has_aux=True)(theta, t)

  grads, mixed, aux = jax.jvp(gradient, (t,), (jnp.ones_like(t),), has_aux=True)
  ahead = jax.tree.map(lambda p, g: p - step_size * g, theta, grads)
  (v_theta, v_t), held_out_aux = jax.grad(held_out_loss, argnums=(0, 1), has_aux=True)(ahead, t)
  indirect = sum(
    jnp.vdot(v, m) for v, m in zip(jax.tree.leaves(v_theta), jax.tree.leaves(mixed), strict=True)
  )
  return grads, v_t - step_size * indirect, aux, held_out_aux


def split_held_out(batch: Batch, held_out_every: int) -> tuple[Batch, Batch]:
  """Splits a batch [B, ...] into training rows [B - B / n, ...] and held-out rows [B / n, ...].

  Every row stays on its device. Needs the mesh and the axis rules in context.
  """
  spec = flax_partitioning.logical_to_mesh_axes(('batch',))

  def pick(x: jax.Array, rows: slice) -> jax.Array:
    grouped = x.reshape(x.shape[0] // held_out_every, held_out_every, *x.shape[1:])
    return lax.with_sharding_constraint(grouped[:, rows].reshape(-1, *x.shape[1:]), spec)

  return tuple(
    jax.tree.map(lambda x, rows=rows: pick(x, rows), batch)
    for rows in (slice(held_out_every - 1), slice(held_out_every - 1, None))
  )


class HeldOutTemperatureTrainer(step_lib.Trainer):
  """A Trainer that trains the temperature on every n-th row of a batch, and the rest on the others.

  The held-out rows are a share of the batch or come from a second data set
  (`HeldOutDatasetConfig`). Their noise has a separate key. The metrics cover the training rows;
  'held_out_loss' is added.
  """

  def __init__(
    self,
    model: Any,
    partitioner: partitioning.PjitPartitioner,
    train_state_axes: TrainState,
    rng: jax.Array,
    num_microbatches: int | None = None,
    held_out_every: Annotated[int, '[2, inf)'] = 8,
    estimator: Literal[LUKETINA, SIMPLE] = LUKETINA,
    **settings,
  ):
    """Takes the arguments of `Trainer` and two more.

    Args:
      model, partitioner, train_state_axes, rng, num_microbatches, settings: as in `Trainer`.
      held_out_every: n; 8 holds out 12.5% of the rows, 4 holds out 25%.
      estimator: the derivative with respect to t; see the module.
    """
    super().__init__(model, partitioner, train_state_axes, rng, num_microbatches, **settings)
    if getattr(model, 'needs_whole_batch', False):
      raise ValueError(
        f'HeldOutTemperatureTrainer cannot hold out rows of {type(model).__name__}: its '
        'loss compares every example with the whole batch.'
      )
    if getattr(model.optimizer_def, 'late_noise', None) is not None:
      raise ValueError(
        'HeldOutTemperatureTrainer needs adamw.late_noise = None: the gradient with respect to the '
        'temperature is that of the model with its noise.'
      )
    if (num_microbatches or 1) > 1:
      raise ValueError(
        f'HeldOutTemperatureTrainer.num_microbatches={num_microbatches} must be 1: the '
        'gradient with respect to the temperature needs the whole batch in one step.'
      )
    self.model = model
    self.partitioner = partitioner
    self.held_out_every = held_out_every
    self.estimator = estimator

  def check_batch_size(self, batch_size: int) -> None:
    """Raises ValueError unless every device holds out the same number of rows."""
    super().check_batch_size(batch_size)
    multiple = self.held_out_every * self.partitioner.data_shards
    if batch_size % multiple:
      raise ValueError(
        f'batch_size={batch_size} must be a multiple of {multiple}: one of '
        f'held_out_every={self.held_out_every} rows is held out on each of the '
        f'{self.partitioner.data_shards} shards of the data axis.'
      )

  def compute_grads(
    self, train_state: TrainState, batch: Batch, step_rng: jax.Array
  ) -> tuple[PyTree, Metrics]:
    train_rows, held_out_rows = split_held_out(batch, self.held_out_every)
    flat = traverse_util.flatten_dict(train_state.params)
    path = _temperature_path(train_state.params)
    t = flat.pop(path)

    def loss(rows: Batch, rng: jax.Array):
      def of(theta: PyTree, t: jax.Array):
        params = traverse_util.unflatten_dict({**theta, path: t})
        params = optimizers.stop_frozen(train_state.optimizer_def, params)
        return self.model.loss_fn(params, rows, rng)

      return of

    losses = loss(train_rows, step_rng), loss(held_out_rows, jax.random.fold_in(step_rng, 1))
    step_size = None if self.estimator == SIMPLE else step_lib.learning_rate(train_state)
    if step_size is None and self.estimator != SIMPLE:
      raise ValueError(
        "HeldOutTemperatureTrainer.estimator='luketina' needs an optimizer with a "
        'learning_rate_fn, such as adamw.'
      )
    grads, t_grad, metrics, held_out = gradients(*losses, flat, t, step_size)
    grads = traverse_util.unflatten_dict({**grads, path: t_grad})
    metrics['held_out_loss'] = held_out['loss']
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads), metrics


@dataclasses.dataclass(frozen=True)
class HeldOutDatasetConfig:
  """Two data sets of one task read as one, `train` and `held_out`.

  Both must be endless (augment = True on a slice). The batch_size of held_out must divide the
  batch_size of train.
  """

  train: data.DatasetConfig
  held_out: data.DatasetConfig

  def __post_init__(self):
    if self.train.batch_size % self.held_out.batch_size:
      raise ValueError(
        f'HeldOutDatasetConfig.held_out.batch_size={self.held_out.batch_size} must divide the '
        f'batch_size of train, {self.train.batch_size}'
      )
    task = self.train.mixture_or_task_name
    if self.held_out.mixture_or_task_name != task:
      raise ValueError(
        f'HeldOutDatasetConfig.held_out.mixture_or_task_name={self.held_out.mixture_or_task_name} '
        f'must be that of train, {task}'
      )

  @property
  def batch_size(self) -> int:
    """Rows of the global batch, of both data sets together."""
    return self.train.batch_size + self.held_out.batch_size

  @property
  def held_out_every(self) -> int:
    """n: one of n rows is held out."""
    return self.batch_size // self.held_out.batch_size

  @property
  def mixture_or_task_name(self) -> str:
    return self.train.mixture_or_task_name


class Interleaved:
  """Batches of two endless data sets, with the interface of `data.BatchIterator`.

  `is_held_out` [rows] tells which rows of the batch are those of the second.
  """

  num_examples = None
  num_batches = None

  def __init__(
    self, train: data.BatchIterator, held_out: data.BatchIterator, is_held_out: np.ndarray
  ):
    self.parts = {'train': train, 'held_out': held_out}
    self.is_held_out = is_held_out
    self.element_spec = {}
    for name, x in train.element_spec.items():
      num_rows = x.shape[0] + held_out.element_spec[name].shape[0]
      self.element_spec[name] = jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype)

  @property
  def corrupt_records(self) -> tuple[str, ...]:
    return tuple(name for part in self.parts.values() for name in part.corrupt_records)

  def __iter__(self) -> 'Interleaved':
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    train, held_out = (next(part) for part in self.parts.values())
    batch = {}
    for name, x in train.items():
      batch[name] = np.empty((len(self.is_held_out), *x.shape[1:]), x.dtype)
      batch[name][~self.is_held_out] = x
      batch[name][self.is_held_out] = held_out[name]
    return batch

  def get_state(self) -> dict[str, int]:
    return {name: part.get_state()['position'] for name, part in self.parts.items()}

  def set_state(self, state: Mapping[str, int]) -> None:
    for name, part in self.parts.items():
      part.set_state({'position': state[name]})

  def close(self) -> None:
    for part in self.parts.values():
      part.close()


def get_dataset_with_held_out(
  cfg: data.DatasetConfig | HeldOutDatasetConfig, rows: Sequence[int] | None = None
) -> data.BatchIterator | Interleaved:
  """`data.get_dataset` that also takes a HeldOutDatasetConfig.

  `index` counts within each data set, so rows of the two may have the same index.

  Raises:
    ValueError: the data sets do not fit the task or each other, or one ends.
  """
  if not isinstance(cfg, HeldOutDatasetConfig):
    return data.get_dataset(cfg, rows)
  n = cfg.held_out_every
  group, place = np.divmod(np.arange(cfg.batch_size) if rows is None else np.asarray(rows), n)
  is_held_out = place == n - 1
  train = data.get_dataset(cfg.train, (group * (n - 1) + place)[~is_held_out])
  held_out = data.get_dataset(cfg.held_out, group[is_held_out])
  for name, part in (('train', train), ('held_out', held_out)):
    if part.num_examples is not None:
      raise ValueError(
        f'HeldOutDatasetConfig.{name} ends after {part.num_examples} examples; it must be endless: '
        'set its augment to True and its num_epochs to None'
      )
  shapes = [
    {name: x.shape[1:] for name, x in part.element_spec.items()} for part in (train, held_out)
  ]
  if shapes[0] != shapes[1]:
    raise ValueError(
      f'HeldOutDatasetConfig.held_out has rows of {shapes[1]} and train of {shapes[0]}; both must '
      'be the same, without mixed images'
    )
  return Interleaved(train, held_out, is_held_out)


for _configurable in (
  HeldOutDatasetConfig,
  HeldOutTemperatureTrainer,
  get_dataset_with_held_out,
  temperature_optimizer,
):
  gin.external_configurable(_configurable, module=__name__)
