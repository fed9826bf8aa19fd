"""Parameters of models under test."""

import jax


def perturbed(params, scale=0.1):
  """Parameters without the zeros and ones of the initialisers, which would hide their use."""
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(2), max(1, len(leaves)))
  noise = [scale * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=False)]
  return tree.unflatten([x + y for x, y in zip(leaves, noise, strict=True)])
