#!/usr/bin/env bash
# clu: `metrics.Std` fails with today's jax, and before that lost deviations below a thousandth of the mean.
#
# Version: clu 0.0.12 (its newest), jax 0.12.0.1 and 0.9.0.
# Behaviour: it calls `jnp.clip(..., a_min=)`, an argument that jax has removed, so `compute` is a TypeError with jax
#   0.10 and later. With jax 0.9 it gives the root of the difference between the mean square and the squared mean, both
#   in float32: the deviation of a gradient norm near 1,000 is 0, and one near 10,000 is off by a factor of 28.
# Output seen (10,000 values whose standard deviation is 0.1):
#   jax 0.12.0.1: TypeError: clip() got an unexpected keyword argument 'a_min'
#   jax 0.9.0: mean 0 0.100, mean 1000 0.000, mean 10000 2.828
# Until it is right: `Average` of the squares of values from which a first guess of their mean was subtracted.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > program.py <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics


def deviation(mean):
  values = mean + 0.1 * np.random.default_rng(0).normal(size=10_000)
  return float(metrics.Std.from_model_output(jnp.asarray(values, jnp.float32)).compute())


if jax.__version__ == '0.9.0':
  found = {mean: deviation(mean) for mean in (0, 1_000, 10_000)}
  print('jax 0.9.0:', ', '.join(f'mean {mean} {x:.3f}' for mean, x in found.items()))
  assert abs(found[0] - 0.1) < 0.01
  assert found[1_000] < 0.05
  assert found[10_000] > 1
else:
  try:
    deviation(0)
  except TypeError as error:
    print(f'jax {jax.__version__}: TypeError: {error}')
  else:
    raise SystemExit('it works now')
PROGRAM
for version in 0.12.0.1 0.9.0; do
  uv venv -q -p "${PYTHON:-3.13}" "venv-$version"
  uv pip install -q -p "venv-$version/bin/python" clu==0.0.12 "jax==$version"
  JAX_PLATFORMS=cpu "venv-$version/bin/python" program.py
done
