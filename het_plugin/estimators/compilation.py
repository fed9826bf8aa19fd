"""How the programs of fits and predictions are compiled."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

LEVEL = 'xla_backend_optimization_level'  # a flag of XLA, and an option of its compiler


def jit(function: Callable, **settings: Any) -> Callable:
  """`jax.jit`; on a CPU with LLVM's level 2, unless XLA_FLAGS chooses one. Settings are jax.jit's.

  With level 3, JAX's default, the gradient of HET-XL and of HET takes 1.4 to 1.9 times as long to
  compile, and as long to compute.
  """

  @functools.cache
  def program() -> Callable:  # at the first call, which is when JAX chooses its devices
    is_chosen = LEVEL in os.environ.get('XLA_FLAGS', '') or jax.default_backend() != 'cpu'
    return jax.jit(function, compiler_options=None if is_chosen else {LEVEL: 2}, **settings)

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    return program()(*args, **kwargs)

  return call
