"""Parameters of models under test."""

import jax
import jax.numpy as jnp
import numpy as np


def perturbed(params, scale=0.1):
  """Parameters without the zeros and ones of the initialisers, which would hide their use."""
  rng = np.random.default_rng(2)

  def moved(x):
    return jnp.asarray(np.asarray(x) + (scale * rng.normal(size=x.shape)).astype(x.dtype))

  return jax.tree.map(moved, params)


def drawn(init, *inputs):
  """Parameters of the shapes that `init(key, *inputs)` makes, none of them zero.

  Without its program, which takes a second to compile.
  """
  rng = np.random.default_rng(2)

  def draw(path, x):
    name = path[-1].key
    size = x.shape[-2] ** -0.5 if x.ndim > 1 else 0.1
    values = size * rng.normal(size=x.shape) + (name in ('scale', 'v_bias'))
    return jnp.asarray(values.astype(x.dtype))

  shapes = jax.eval_shape(init, jax.random.key(1), *inputs).get('params', {})
  return jax.tree_util.tree_map_with_path(draw, shapes)
