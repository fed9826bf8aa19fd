"""Our optimizer with the interface of t5x."""

import functools

from t5x import optimizers as t5x_optimizers

from het_plugin.training import optimizers


@functools.wraps(optimizers.adamw)
def adamw(*args, **kwargs) -> t5x_optimizers.OptaxWrapper:
  """`training.optimizers.adamw` as t5x wants it."""
  return t5x_optimizers.OptaxWrapper(optimizers.adamw(*args, **kwargs).optax_optimizer)
