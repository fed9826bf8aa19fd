#!/usr/bin/env bash
# Kauldron: a NaN in a row that the mask leaves out makes a loss NaN.
#
# Version: kauldron 1.4.4, jax 0.12.0.1.
# Behaviour: the mask of a loss "can be used to ignore parts of the batch", but the values are multiplied by it, and
#   0 * NaN is NaN. Padded rows of an evaluation, and images that could not be read, are such rows.
# Output seen:
#   no NaN: 1.0986
#   NaN in the row whose mask is 0: nan
# Until it is right: set such rows to something finite before the model. het_plugin.hosts.kauldron.Nll leaves them out.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a few minutes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" kauldron==1.4.4 jax==0.12.0.1
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PROGRAM'
import jax.numpy as jnp
import numpy as np
from kauldron import kd

loss = kd.losses.SoftmaxCrossEntropyWithIntLabels(logits='preds', labels='batch.label')
logits = jnp.zeros((2, 3))
labels = jnp.zeros((2, 1), jnp.int32)
mask = jnp.array([[1.0], [0.0]])
good = float(loss(logits=logits, labels=labels, mask=mask))
bad = float(loss(logits=logits.at[1].set(jnp.nan), labels=labels, mask=mask))
print(f'no NaN: {good:.4f}')
print(f'NaN in the row whose mask is 0: {bad}')
np.testing.assert_allclose(good, np.log(3), rtol=1e-5)
assert np.isnan(bad)
PROGRAM
