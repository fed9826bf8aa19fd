"""Late noise: a head trains as DET, and starts its noise at a step (gin/heads/late_noise.gin)."""

import dataclasses
from typing import Annotated, Any

import jax

from het_plugin.system import ranges
from het_plugin.system.ranges import Pattern


@dataclasses.dataclass(frozen=True)
class LateNoise:
  """The update at which the noise of a head starts, for optimizer, trainer and model together.

  `adamw` takes it and keeps the values of the parameters of the noise until then; `Trainer` finds
  it in the result, and trains and evaluates `model.without_noise()` until then.

      >>> from het_plugin.training import late_noise
      >>> late_noise.LateNoise(0.25, total_steps=1500).step
      375
      >>> late_noise.LateNoise(10, total_steps=1500).step
      10

  Attributes:
    start: a share of total_steps; from 1 on, a number of updates.
    total_steps: number of updates of the run.
    params: regular expression, found in the paths of the parameters of the noise and no others.

  Raises:
    ValueError: start is negative, or not before total_steps.
  """

  start: Annotated[float, '[0, inf)']
  total_steps: int
  params: Pattern = '^head/(covariance/|noise_kernel$|image_to_text/|text_to_image/)'

  def __post_init__(self):
    ranges.check(self)
    if self.step >= self.total_steps:
      raise ValueError(
        f'LateNoise.start={self.start} must be below total_steps={self.total_steps}, or below 1, a '
        'share of them'
      )

  @property
  def step(self) -> int:
    """Number of updates without noise."""
    return round(self.start * self.total_steps) if self.start < 1 else int(self.start)

  def has_begun(self, num_updates: jax.Array) -> jax.Array:
    """Whether the noise takes part in the next update, bool []."""
    return num_updates >= self.step

  def without_noise(self, model: Any) -> Any:
    """The model to train and to evaluate before `step`.

    Raises:
      ValueError: the model has no method `without_noise`.
    """
    if not hasattr(model, 'without_noise'):
      raise ValueError(
        f'adamw.late_noise must be None: {type(model).__name__} has no method without_noise'
      )
    return model.without_noise()
