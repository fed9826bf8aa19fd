#!/usr/bin/env bash
# jax: with labels in uint8 or int8, `one_hot` over more classes than the type has numbers marks several classes a row.
#
# Version: jax 0.12.0.1, flax 0.12.12, optax 0.2.8.
# Behaviour: `jax.nn.one_hot` compares labels with 0, 1, 2, ... in the type of the labels. Where that type ends, the
#   numbers begin again: label 3 among 1,000 classes is also 259, 515 and 771. Ten classes in uint8 under a head of
#   1,000 or 21,843 classes are such labels. Their cross-entropy is a sum over all marked classes, and its gradient
#   raises each of them, without a word. `flax.linen` and `flax.nnx` have the same function. optax's loss of integer
#   labels is right.
# Output seen (label 3 of 1,000 classes, equal logits, so the right loss is log 1000 = 6.908):
#   uint8: classes [3, 259, 515, 771], loss 27.631, of integer labels 6.908
#   int8: classes [3, 259, 515, 771], loss 27.631, of integer labels 6.908
#   int16: classes [3], loss 6.908, of integer labels 6.908
# Until it is right: `labels.astype(np.int32)` where they are read, as het_plugin's tasks do.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" jax==0.12.0.1 flax==0.12.12 optax==0.2.8
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PROGRAM'
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def marked(dtype):
  label = jnp.array([3], dtype)
  logits = jnp.zeros((1, 1_000))
  target = jax.nn.one_hot(label, 1_000)
  for one_hot in (nn.one_hot, nnx.one_hot):
    np.testing.assert_array_equal(one_hot(label, 1_000), target)
  classes = np.flatnonzero(target[0]).tolist()
  loss = float(optax.softmax_cross_entropy(logits, target)[0])
  integer = float(optax.softmax_cross_entropy_with_integer_labels(logits, label)[0])
  print(
    f'{jnp.dtype(dtype).name}: classes {classes}, loss {loss:.3f}, of integer labels {integer:.3f}'
  )
  assert abs(integer - np.log(1_000)) < 1e-3
  return classes


assert marked(jnp.uint8) == [3, 259, 515, 771]
assert marked(jnp.int8) == [3, 259, 515, 771]
assert marked(jnp.int16) == [3]
PROGRAM
