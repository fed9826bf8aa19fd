#!/usr/bin/env bash
# tokamax: the loss in chunks is wrong where 2,048 does not divide the number of classes.
#
# Version: tokamax 0.0.17, jax 0.12.0.1, on a CPU.
# Behaviour: `linear_softmax_cross_entropy_loss(..., implementation='chunked_xla')` takes classes in chunks. If the last
#   chunk is not full, the loss is too large, without a word: what fills the chunk counts as classes. The
#   implementation 'xla' of the same function is right, and both agree where 2,048 divides the classes.
# Output seen:
#   K = 1000: xla 6.9078, chunked_xla 7.6246
#   K = 2048: xla 7.6246, chunked_xla 7.6246
#   K = 3000: xla 8.0064, chunked_xla 8.3178
# (With W = 0 the right loss is log K; what is returned is the log of the next multiple of 2,048.)
# Until it is right: pad W yourself with columns that give a logit of -1e30, or choose K so that 2,048 divides it.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" tokamax==0.0.17 jax==0.12.0.1
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PROGRAM'
import jax.numpy as jnp
import numpy as np
import tokamax

x = jnp.ones((128, 128))
labels = jnp.zeros(128, jnp.int32)
for num_classes in (1000, 2048, 3000):
  weights = jnp.zeros((128, num_classes))
  losses = {
    name: float(
      tokamax.linear_softmax_cross_entropy_loss(
        x, labels, weights, reduction='mean', implementation=name
      )
    )
    for name in ('xla', 'chunked_xla')
  }
  print(f'K = {num_classes}: ' + ', '.join(f'{name} {loss:.4f}' for name, loss in losses.items()))
  np.testing.assert_allclose(losses['xla'], np.log(num_classes), rtol=1e-5)
  filled = -(-num_classes // 2048) * 2048
  np.testing.assert_allclose(losses['chunked_xla'], np.log(filled), rtol=1e-5)
PROGRAM
