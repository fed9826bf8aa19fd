#!/usr/bin/env bash
# netcal: `TemperatureScaling` of confidences in float32 changes nothing, and of the same in float64 is right.
#
# Version: netcal 1.4.0, torch 2.14.1, scipy 1.18.1.
# Behaviour: the temperature is found by L-BFGS-B of scipy, with differences of the loss as its gradient. In float32 a
#   step of 1e-8 does not change the loss, so the gradient is 0, the start is an optimum, and the temperature stays 1.
#   Networks and files of predictions have float32, those of het_plugin among them.
# Output seen (logits that are three times too large; negative log-likelihood):
#   float32: 1.328 before, 1.328 after
#   float64: 1.328 before, 0.860 after
# Until it is right: `confidences.astype(np.float64)` for `fit` and `transform`.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes some minutes, for it installs torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" netcal==1.4.0 torch==2.14.1 scipy==1.18.1
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
from netcal.scaling import TemperatureScaling
from scipy.special import softmax

rng = np.random.default_rng(0)
logits = 2 * rng.normal(size=(1000, 5))
label = np.array([rng.choice(5, p=p) for p in softmax(logits, 1)])


def nll(p):
  return -np.log(p[np.arange(1000), label].astype(np.float64)).mean()


found = {}
for dtype in (np.float32, np.float64):
  p = softmax(3 * logits, 1).astype(dtype)
  scaling = TemperatureScaling()
  scaling.fit(p, label)
  found[dtype] = nll(p), nll(scaling.transform(p))
  print(f'{dtype.__name__}: {found[dtype][0]:.3f} before, {found[dtype][1]:.3f} after')
assert abs(found[np.float32][0] - found[np.float32][1]) < 1e-3
assert found[np.float64][1] < 0.87
PROGRAM
