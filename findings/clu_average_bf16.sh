#!/usr/bin/env bash
# clu: the average of a metric in bfloat16 falls to a fraction of itself as batches are added.
#
# Version: clu 0.0.12, jax 0.12.0.1.
# Behaviour: `Average` keeps the sum in the type of the values and the count in int32. In bfloat16 a sum stops to grow at
#   256 times what a batch adds, so that after 2,560 batches the average is a tenth of the values. Merged into `empty()`
#   it is right, for that one has float32; a loop that begins with the metrics of its first batch, and
#   `Collection.reduce` over a stack of them, stay in bfloat16. `Accuracy` is float32.
# Output seen (2,560 batches of eight losses of 1):
#   from the first batch: 0.1001
#   from empty(): 1.0000
#   eight batches: 1.0000
# Until it is right: losses in float32, whatever the model computes in, as those of het_plugin are.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" clu==0.0.12 jax==0.12.0.1
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PROGRAM'
import jax.numpy as jnp
from clu import metrics

batch = metrics.Average.from_model_output(jnp.ones(8, jnp.bfloat16))


def average(first, num_batches):
  merged = first
  for _ in range(num_batches):
    merged = merged.merge(batch)
  return float(merged.compute())


from_batch = average(batch, 2559)
from_empty = average(metrics.Average.empty(), 2560)
few = average(batch, 7)
print(f'from the first batch: {from_batch:.4f}')
print(f'from empty(): {from_empty:.4f}')
print(f'eight batches: {few:.4f}')
assert from_batch < 0.11
assert from_empty == few == 1
PROGRAM
