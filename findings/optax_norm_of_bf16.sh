#!/usr/bin/env bash
# optax: `clip_by_global_norm` lets gradients in bfloat16 through at twice the norm, and makes zeros of float16.
#
# Version: optax 0.2.8, jax 0.12.0.1.
# Behaviour: `global_norm` squares each array in its own type and adds the squares of the arrays in that type. In bfloat16
#   an array whose square is below 1/512 of the sum so far adds nothing, so the many small arrays of a network do not
#   count. In float16 a gradient of 300 has an infinite square: the norm is infinite and the update 0.
# Output seen (1,000 arrays whose norm is 1, and one gradient of 300; clipped to 1):
#   float32: norm 31.623, after clipping 1.000
#   bfloat16: norm 16.000, after clipping 1.976
#   float16: norm inf, after clipping 0.000
# Until it is right: gradients in float32 before the optimizer, as het_plugin's trainer has them.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" optax==0.2.8 jax==0.12.0.1
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np
import optax


def norms(gradients):
  clip = optax.clip_by_global_norm(1.0)
  clipped, _ = clip.update(gradients, clip.init(gradients))
  exact = [np.asarray(x, np.float64) for x in jax.tree.leaves(clipped)]
  before = float(optax.global_norm(gradients))
  after = float(np.sqrt(sum((x**2).sum() for x in exact)))
  print(f'{gradients[0].dtype}: norm {before:.3f}, after clipping {after:.3f}')
  return before, after


before, after = norms([jnp.ones(())] * 1000)
assert abs(before**2 - 1000) < 0.1
assert abs(after - 1) < 1e-5
before, after = norms([jnp.ones((), jnp.bfloat16)] * 1000)
assert before == 16
assert after > 1.9
before, after = norms([jnp.full((), 300, jnp.float16)])
assert before == np.inf
assert after == 0
PROGRAM
