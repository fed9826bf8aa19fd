#!/usr/bin/env bash
# numpy: the mean of an array that jax computed in bfloat16 goes to 0 as the array grows.
#
# Version: numpy 2.5.5, ml_dtypes 0.6.0, jax 0.12.0.1.
# Behaviour: `np.asarray` of a bfloat16 array keeps that type, and NumPy adds it up one after the other in it. A sum of
#   values of 1 stops at 256. An accuracy over an evaluation split is then 256 divided by the number of examples, the
#   smaller the more there are. float16 has an accumulator in float32, and `jnp.mean` has one for both, so that the same
#   line is right before the array is brought to the host. `np.sum`, `np.var`, `np.std` and `np.cumsum` are alike.
#   scikit-learn's log loss is right, for it converts.
# Output seen (50,000 examples, of which 70% are right):
#   jnp.mean 0.699
#   np.mean of bfloat16 0.005
#   np.mean of float16 0.699
#   np.mean of bfloat16, dtype=np.float32 0.699
# Until it is right: `np.asarray(x, np.float32)`, or the mean before the array leaves the device.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" numpy==2.5.5 ml_dtypes==0.6.0 jax==0.12.0.1
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np

correct = jax.random.bernoulli(jax.random.key(0), 0.7, (50_000,)).astype(jnp.bfloat16)
on_host = np.asarray(correct)
means = {
  'jnp.mean': jnp.mean(correct),
  'np.mean of bfloat16': np.mean(on_host),
  'np.mean of float16': np.mean(on_host.astype(np.float16)),
  'np.mean of bfloat16, dtype=np.float32': np.mean(on_host, dtype=np.float32),
}
for name, mean in means.items():
  print(f'{name} {float(mean):.3f}')
  right = name != 'np.mean of bfloat16'
  assert abs(float(mean) - (0.7 if right else 256 / 50_000)) < 0.01
PROGRAM
