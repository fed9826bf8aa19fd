"""Optimizers and learning-rate schedules from plain arguments, as optax transformations."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from het_plugin.system import ranges
from het_plugin.system.ranges import Pattern, Positive
from het_plugin.training import learning_rates
from het_plugin.training.late_noise import LateNoise

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class OptaxWrapper:
  """A model's `optimizer_def`; `optax_optimizer` has the name of t5x's attribute.

  Attributes:
    optax_optimizer: the gradient transformation, with its schedule.
    learning_rate_fn: step -> learning rate, the schedule inside `optax_optimizer`, for logging;
      None if unknown.
    evaluates_ema: whether evaluation uses the average that `with_ema` keeps.
    frozen_params: regular expression of the parameters that keep their value, see `adamw`.
    late_noise: when the noise of the head starts, see `adamw`.
  """

  optax_optimizer: optax.GradientTransformation
  learning_rate_fn: optax.Schedule | None = None
  evaluates_ema: bool = False
  frozen_params: str | None = None
  late_noise: LateNoise | None = None


@ranges.checked
def adamw(
  learning_rate: float | optax.Schedule,
  *,
  b1: Annotated[float, '[0, 1)'] = 0.9,
  b2: Annotated[float, '[0, 1)'] = 0.999,
  eps: float = 1e-8,
  weight_decay: Annotated[float, '[0, inf)'] = 0.0,
  weight_decay_params: Pattern = r'(kernel|/J)$',
  clip_norm: Positive | None = None,
  frozen_params: Pattern | None = None,
  learning_rate_factors: Sequence[tuple[Pattern, float | optax.Schedule]] = (),
  layer_decay: Annotated[float, '(0, 1]'] | None = None,
  factored_params: Pattern | None = None,
  late_noise: LateNoise | None = None,
) -> OptaxWrapper:
  """AdamW (Loshchilov and Hutter, 2019): updates are -lr * (adam(gradient) + weight_decay * param).

  Args:
    learning_rate: a number, or step -> number (see `warmup_schedule`).
    b1, b2, eps: Adam's constants.
    weight_decay: factor of learning rate times parameter.
    weight_decay_params: regular expression; parameters decay if it is found in their path
      ('head/kernel'). The default leaves out temperature, norms, biases and embeddings.
    clip_norm: gradients are scaled down to this global norm before Adam; None for no clipping.
    frozen_params: regular expression; parameters keep their value if it is found in their path
      ('^backbone/'). They have no moments and no gradient, so that a frozen backbone costs no
      backward pass. None freezes nothing.
    learning_rate_factors: (regular expression, factor): the learning rate of a parameter is
      multiplied by the factor of the first pattern that is found in its path, a number or a
      schedule such as `learning_rates.unfreeze_at`.
    layer_decay: the learning rate of a layer is this factor times the rate of the next layer
      (`learning_rates.scale_by_layer`); None for the same rate everywhere.
    factored_params: regular expression; if it is found in the path of a parameter, Adafactor takes
      the place of Adam there: a matrix [D, K] keeps D + K numbers instead of two moments
      (`factored_rms`). '^head/(kernel|noise_kernel)$' are W and W'. Learning rate, decay and
      clipping are the same. None for none.
    late_noise: the parameters of the noise keep their value, and have no part in the norm, before
      its step. Their moments start there as at the start of a run; the learning rate is that of the
      others. None trains them from the first step on.

  Raises:
    ValueError: at initialisation, a pattern matches no parameter, or layer_decay is set for a model
      without layers.
  """

  def decays(params: PyTree) -> PyTree:
    if not weight_decay:
      return jax.tree.map(lambda _: False, params)
    # With frozen parameters it is among all that the pattern must match: `freezes` has seen to it.
    setting = 'weight_decay_params' if frozen_params is None else None
    return learning_rates.matching(weight_decay_params, params, setting)

  def freezes(params: PyTree) -> PyTree:
    if weight_decay:
      learning_rates.matching(weight_decay_params, params, 'weight_decay_params')
    mask = learning_rates.matching(frozen_params, params, 'frozen_params')
    return jax.tree.map(lambda is_frozen: 'frozen' if is_frozen else 'trained', mask)

  def kinds(params: PyTree) -> PyTree:
    found = jax.tree.map(lambda _: 'adam', params)
    if factored_params is not None:
      mask = learning_rates.matching(factored_params, params, 'factored_params')
      found = jax.tree.map(lambda is_factored: 'factored' if is_factored else 'adam', mask)
    if late_noise is not None:
      mask = learning_rates.matching(late_noise.params, params, 'LateNoise.params')
      found = jax.tree.map(lambda kind, is_late: kind + '_late' * is_late, found, mask)
    return found

  scales = {'adam': optax.scale_by_adam(b1=b1, b2=b2, eps=eps)}
  if factored_params is not None:
    scales['factored'] = factored_rms()
  if late_noise is not None:
    scales |= {
      f'{kind}_late': optax.conditionally_mask(scale, late_noise.has_begun)
      for kind, scale in scales.items()
    }
  scale = optax.partition(scales, kinds) if len(scales) > 1 else scales['adam']
  decay = optax.add_decayed_weights(weight_decay, decays)
  parts = [optax.chain(scale, decay, optax.scale_by_learning_rate(learning_rate))]
  if clip_norm is not None:
    parts.insert(0, optax.clip_by_global_norm(clip_norm))
  if learning_rate_factors:
    parts.append(learning_rates.scale_by_group(learning_rate_factors))
  if layer_decay is not None:
    parts.append(learning_rates.scale_by_layer(layer_decay))
  if late_noise is not None:  # neither the norm nor weight decay sees its parameters before
    factor = (late_noise.params, learning_rates.unfreeze_at(late_noise.step))
    unfreeze = learning_rates.scale_by_group((factor,), 'LateNoise.params')
    parts = [unfreeze, *parts, unfreeze]
  schedule = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
  optimizer = optax.chain(*parts)
  if frozen_params is not None:
    optimizer = optax.partition({'trained': optimizer, 'frozen': optax.set_to_zero()}, freezes)
  return OptaxWrapper(
    optimizer, learning_rate_fn=schedule, frozen_params=frozen_params, late_noise=late_noise
  )


def factored_rms() -> optax.GradientTransformation:
  """Adafactor without momentum (Shazeer and Stern, 2018, https://arxiv.org/abs/1804.04235).

  Gradients are divided by the root of a second moment, and the result by its own root mean square
  if that is above 1 (algorithm 4). Of the second moment of a matrix only the means over rows and
  over columns are kept. Steps are not in units of the parameter's size, so a learning rate means
  what it means for Adam.
  """
  return optax.chain(
    optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.clip_by_block_rms(1.0)
  )


class EmaState(NamedTuple):
  """State of `with_ema`: number of updates, int32 [], and average, shaped as the parameters."""

  updates: jax.Array
  ema_params: PyTree


@ranges.checked
def with_ema(
  optimizer_def: OptaxWrapper, decay: Annotated[float, '(0, 1)'], evaluate: bool = True
) -> OptaxWrapper:
  """Keeps an exponential moving average of the parameters in the state of an optimizer.

  After update n the average is d ema + (1 - d) params with d = min(decay, (n - 1) / (n + 8)). This
  is the warm-up of TensorFlow's ExponentialMovingAverage, which forgets the start even of a short
  run.

  Args:
    optimizer_def: updates the parameters.
    decay: the largest d; 0.9999 averages over the last 10,000 steps.
    evaluate: whether evaluation, in training and after it, uses the average instead of the
      parameters. Training is the same.
  """

  def init(params: PyTree) -> EmaState:
    return EmaState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

  def update(updates: PyTree, state: EmaState, params: PyTree) -> tuple[PyTree, EmaState]:
    step_size = jnp.maximum(1 - decay, 9.0 / (state.updates + 9.0))
    new = optax.apply_updates(params, updates)
    average = optax.incremental_update(new, state.ema_params, step_size)
    return updates, EmaState(state.updates + 1, average)

  keep = optax.GradientTransformation(init, update)
  return dataclasses.replace(
    optimizer_def,
    optax_optimizer=optax.chain(optimizer_def.optax_optimizer, keep),
    evaluates_ema=evaluate,
  )


def evaluates_ema(optimizer_def: Any) -> bool:
  """Whether evaluation uses the average of `with_ema`; False for optimizers that are not ours."""
  return getattr(optimizer_def, 'evaluates_ema', False)


def stop_frozen(optimizer_def: Any, params: PyTree) -> PyTree:
  """Stops the gradient of the frozen parameters; their values stay the same."""
  pattern = getattr(optimizer_def, 'frozen_params', None)  # optimizers that are not ours have none
  if pattern is None:
    return params
  mask = learning_rates.matching(pattern, params, 'frozen_params')
  stop = jax.lax.stop_gradient
  return jax.tree.map(lambda p, is_frozen: stop(p) if is_frozen else p, params, mask)


def ema_params(opt_state: PyTree) -> PyTree:
  """The average in the state of an optimizer of `with_ema`."""
  return optax.tree.get(opt_state, 'ema_params')


@ranges.checked
def warmup_schedule(
  peak_value: Positive,
  total_steps: int,
  warmup_steps: int | Annotated[float, '[0, 1)'] = 0,
  decay: Literal['linear', 'cosine', 'constant', 'rsqrt'] = 'linear',
  init_value: float = 0.0,
  end_value: float = 0.0,
) -> optax.Schedule:
  """Linear warm-up from init_value to peak_value, then a decay to end_value at total_steps.

  Args:
    peak_value: learning rate at the end of the warm-up.
    total_steps: length of the schedule, including the warm-up; the last value stays afterwards.
    warmup_steps: a number below 1 is a share of total_steps. 0 starts at peak_value.
    decay: 'constant' stays at peak_value; 'rsqrt' is peak_value * sqrt(warmup_steps / step)
      (Vaswani et al., 2017).
    init_value: learning rate of step 0 if there is a warm-up.
    end_value: learning rate at total_steps; a lower bound for 'rsqrt', ignored by 'constant'.

  Raises:
    ValueError: the warm-up is not shorter than total_steps; or when the schedule is called, so that
      a run that had it can be opened, init_value or end_value is above peak_value.
  """
  if not 0 <= warmup_steps < total_steps:
    raise ValueError(
      f'warmup_steps={warmup_steps} must be at least 0 and below '
      f'total_steps={total_steps}; below 1 it is a share of them'
    )
  if warmup_steps < 1:
    warmup_steps = min(round(warmup_steps * total_steps), total_steps - 1)
  steps = total_steps - warmup_steps
  ends = {'init_value': init_value} if warmup_steps else {}
  ends |= {} if decay == 'constant' else {'end_value': end_value}
  for name, value in ends.items():
    if value > peak_value:
      return functools.partial(_refuse, name, value, peak_value)
  decays: dict[str, Callable[[], optax.Schedule]] = {
    'linear': lambda: optax.linear_schedule(peak_value, end_value, steps),
    'cosine': lambda: optax.cosine_decay_schedule(peak_value, steps, alpha=end_value / peak_value),
    'constant': lambda: optax.constant_schedule(peak_value),
    'rsqrt': lambda: _rsqrt_schedule(peak_value, max(warmup_steps, 1), end_value, steps),
  }
  if not warmup_steps:
    return decays[decay]()
  warmup = optax.linear_schedule(init_value, peak_value, warmup_steps)
  return optax.join_schedules([warmup, decays[decay]()], [warmup_steps])


def _refuse(name: str, value: float, peak_value: float, count: jax.Array) -> jax.Array:
  raise ValueError(
    f'warmup_schedule.{name}={value} must be at most peak_value={peak_value} (LEARNING_RATE), or '
    'the learning rate would be largest there'
  )


def _rsqrt_schedule(
  peak_value: float, timescale: int, end_value: float, steps: int
) -> optax.Schedule:
  def schedule(count: jax.Array) -> jax.Array:
    count = jnp.minimum(count, steps)
    return jnp.maximum(peak_value * jnp.sqrt(timescale / (timescale + count)), end_value)

  return schedule


def num_updates(opt_state: PyTree, default: jax.Array) -> jax.Array:
  """Number of updates that a schedule inside the optimizer has counted; `default` if none does."""
  counts = optax.tree.get_all_with_path(opt_state, 'count')
  return counts[0][1] if counts else default


def state_specs(opt_state: PyTree, params: PyTree, param_specs: PyTree) -> PyTree:
  """PartitionSpecs of an optimizer state.

  A leaf whose path ends with the path of a parameter, and which has its shape, gets the parameter's
  spec. One that has this shape without one dimension (the means of `factored_rms`) gets the spec
  without it. Other leaves are small (counts) and are replicated. This works for any optax
  optimizer, masked ones included.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
  by_path = {path: (p.shape, spec) for (path, p), spec in zip(leaves, specs, strict=True)}

  def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
    for start in range(len(path)):
      if path[start:] in by_path:
        return _spec_of(leaf.shape, *by_path[path[start:]])
    return PartitionSpec()

  return jax.tree_util.tree_map_with_path(spec, opt_state)


def _spec_of(
  shape: tuple[int, ...], param_shape: tuple[int, ...], param_spec: PartitionSpec
) -> PartitionSpec:
  """The spec of a shape that may be a parameter's, or that without one dimension."""
  if shape == param_shape:
    return param_spec
  axes = (*param_spec, *(None,) * (len(param_shape) - len(param_spec)))
  for i in range(len(param_shape)):
    if shape == param_shape[:i] + param_shape[i + 1 :]:
      return PartitionSpec(*axes[:i], *axes[i + 1 :])
  return PartitionSpec()
