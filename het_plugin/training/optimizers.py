"""Optimizers and learning-rate schedules from plain arguments, as optax transformations."""

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Any

import jax
import optax
from jax.sharding import PartitionSpec

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class OptaxWrapper:
  """A model's `optimizer_def`; `optax_optimizer` has the name of t5x's attribute.

  Attributes:
    optax_optimizer: the gradient transformation, with its schedule.
    learning_rate_fn: step -> learning rate, the schedule inside `optax_optimizer`, for logging;
      None if unknown.
  """

  optax_optimizer: optax.GradientTransformation
  learning_rate_fn: optax.Schedule | None = None


def adamw(
  learning_rate: float | optax.Schedule,
  *,
  b1: Annotated[float, '[0, 1)'] = 0.9,
  b2: Annotated[float, '[0, 1)'] = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  weight_decay_params: Annotated[str, 'regular expression'] = r'(kernel|/J)$',
  clip_norm: float | None = None,
  frozen_params: Annotated[str, 'regular expression'] | None = None,
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
      ('^backbone/'). They have no moments and do not count in the norm. None freezes nothing.

  Raises:
    ValueError: weight_decay is negative or clip_norm is not positive; at initialisation, a pattern
      matches no parameter.
  """
  if weight_decay < 0:
    raise ValueError(f'weight_decay={weight_decay} must be at least 0.')
  if clip_norm is not None and clip_norm <= 0:
    raise ValueError(f'clip_norm={clip_norm} must be positive, or None for no clipping.')

  def decays(params: PyTree) -> PyTree:
    mask = _matching(weight_decay_params, params)
    if weight_decay and not any(jax.tree.leaves(mask)):
      raise ValueError(f'weight_decay_params={weight_decay_params!r} matches no parameter.')
    return mask

  def freezes(params: PyTree) -> PyTree:
    mask = _matching(frozen_params, params)
    if not any(jax.tree.leaves(mask)):
      raise ValueError(f'frozen_params={frozen_params!r} matches no parameter.')
    return jax.tree.map(lambda is_frozen: 'frozen' if is_frozen else 'trained', mask)

  clip = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
  adam = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decays)
  schedule = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
  optimizer = optax.chain(*clip, adam)
  if frozen_params is not None:
    optimizer = optax.partition({'trained': optimizer, 'frozen': optax.set_to_zero()}, freezes)
  return OptaxWrapper(optimizer, learning_rate_fn=schedule)


def warmup_schedule(
  peak_value: float,
  total_steps: int,
  warmup_steps: int = 0,
  decay: str = 'linear',
  init_value: float = 0.0,
  end_value: float = 0.0,
) -> optax.Schedule:
  """Linear warm-up from init_value to peak_value, then a decay to end_value at total_steps.

  Args:
    peak_value: learning rate at the end of the warm-up.
    total_steps: length of the schedule, warm-up included; the last value stays afterwards.
    warmup_steps: 0 starts at peak_value.
    decay: 'linear', 'cosine', 'constant' (stays at peak_value), or 'rsqrt', which is peak_value *
      sqrt(warmup_steps / step) (Vaswani et al., 2017).
    init_value: learning rate of step 0 if there is a warm-up.
    end_value: learning rate at total_steps; 'rsqrt' takes it as a lower bound, 'constant' ignores
      it.

  Raises:
    ValueError: decay is unknown, the warm-up is not shorter than total_steps, or peak_value is not
      positive.
  """
  if not 0 <= warmup_steps < total_steps:
    raise ValueError(
      f'warmup_steps={warmup_steps} (WARMUP_STEPS) must be at least 0 and below '
      f'total_steps={total_steps}.'
    )
  if peak_value <= 0:
    raise ValueError(f'peak_value={peak_value} must be positive.')
  steps = total_steps - warmup_steps
  decays: dict[str, Callable[[], optax.Schedule]] = {
    'linear': lambda: optax.linear_schedule(peak_value, end_value, steps),
    'cosine': lambda: optax.cosine_decay_schedule(peak_value, steps, alpha=end_value / peak_value),
    'constant': lambda: optax.constant_schedule(peak_value),
    'rsqrt': lambda: _rsqrt_schedule(peak_value, max(warmup_steps, 1), end_value, steps),
  }
  if decay not in decays:
    raise ValueError(f'Unknown decay {decay!r}; valid are {", ".join(decays)}.')
  if not warmup_steps:
    return decays[decay]()
  warmup = optax.linear_schedule(init_value, peak_value, warmup_steps)
  return optax.join_schedules([warmup, decays[decay]()], [warmup_steps])


def _rsqrt_schedule(
  peak_value: float, timescale: int, end_value: float, steps: int
) -> optax.Schedule:
  def schedule(count):
    count = jax.numpy.minimum(count, steps)
    return jax.numpy.maximum(
      peak_value * jax.numpy.sqrt(timescale / (timescale + count)), end_value
    )

  return schedule


def num_updates(opt_state: PyTree, default: jax.Array) -> jax.Array:
  """Number of updates that a schedule inside the optimizer has counted; `default` if none does."""
  counts = optax.tree.get_all_with_path(opt_state, 'count')
  return counts[0][1] if counts else default


def state_specs(opt_state: PyTree, params: PyTree, param_specs: PyTree) -> PyTree:
  """PartitionSpecs of an optimizer state.

  A leaf whose path ends with the path of a parameter, and which has its shape, gets the parameter's
  spec. Other leaves are small (counts, Adafactor's row and column sums) and are replicated. This
  works for any optax optimizer, masked ones included.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
  by_path = {path: (p.shape, spec) for (path, p), spec in zip(leaves, specs, strict=True)}

  def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
    for start in range(len(path)):
      shape, param_spec = by_path.get(path[start:], (None, None))
      if shape == leaf.shape:
        return param_spec
    return PartitionSpec()

  return jax.tree_util.tree_map_with_path(spec, opt_state)


def _matching(pattern: str, params: PyTree) -> PyTree:
  """Whether the pattern is found in each parameter's path."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: bool(re.search(pattern, _path_name(path))), params
  )


def _path_name(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')
