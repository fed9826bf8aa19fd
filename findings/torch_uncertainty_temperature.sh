#!/usr/bin/env bash
# torch-uncertainty: where a model is far too sure, `TemperatureScaler` makes it certain.
#
# Version: torch-uncertainty 0.13.0, torch 2.14.1.
# Behaviour: it minimises the loss by the inverse temperature with torch's L-BFGS, without a line search and without a
#   bound. The first steps overshoot below 0 and are thrown back to thousands or millions. The loss is inf or in the
#   millions then. An error is logged for negative temperatures only, so nothing is said. It happens to
#   models that have fitted wrong labels, for which one calibrates; where the best temperature was below 6 it was found.
# Output seen (the logits of a calibrated model, times a factor; negative log-likelihood):
#   times 3: 1.477 before, 0.911 after, temperature 3.1
#   times 8: 3.581 before, 58126.085 after, temperature 6.1e-05
#   times 8: 3.581 before, 0.911 after, temperature 8.2 (from `init_temperature=16`)
# Until it is right: `init_temperature` near the standard deviation of the logits, and a look at the loss after.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes some minutes, for it installs torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" torch-uncertainty==0.13.0 torch==2.14.1 \
  torchvision lightning rich scikit-learn
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import logging

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.post_processing import TemperatureScaler

logging.disable(logging.WARNING)
rng = np.random.default_rng(0)
calibrated = 2 * rng.normal(size=(1000, 5))
label = torch.tensor((calibrated + rng.gumbel(size=(1000, 5))).argmax(1))


def after(factor, **settings):
  logits = torch.tensor(factor * calibrated, dtype=torch.float32)
  scaler = TemperatureScaler(**settings)
  scaler.fit(DataLoader(TensorDataset(logits, label), batch_size=100), progress=False)
  losses = [float(cross_entropy(x.double(), label)) for x in (logits, scaler(logits).detach())]
  temperature = float(scaler.temperature[0])
  print(
    f'times {factor}: {losses[0]:.3f} before, {losses[1]:.3f} after, temperature {temperature:.2g}'
  )
  return losses, temperature


losses, temperature = after(3)
assert losses[1] < 0.92
losses, temperature = after(8)
assert losses[1] > 100
assert 0 < temperature < 0.1
losses, temperature = after(8, init_temperature=16)
assert losses[1] < 0.92
PROGRAM
