#!/usr/bin/env bash
# probmetrics, netcal: a class that no label of the evaluated rows has changes the calibration error, or ends it.
#
# Version: probmetrics 1.3.0, netcal 1.4.0.
# Behaviour: thirty thousand classes and five thousand labels leave most classes without one. probmetrics drops their
#   columns and divides the rest by its sum before the error of calibration, so the confidences are no longer those of
#   the model; its NLL and Brier score keep them. netcal decides by the labels that are there: with two classes among
#   them it takes the problem for a binary one and refuses the three columns.
# Output seen (confidence 0.6 of class 0, accuracy 0.5, no label of the third class, so the error is 0.1):
#   probmetrics ece-15 0.250
#   netcal ECE: Asserted binary classification problem but retrieved more than 2 confidence dims.
# Until it is right: give these functions the confidence of the first class and whether it is the label, as a problem of
#   two classes.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes some minutes, for both install torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" probmetrics==1.3.0 netcal==1.4.0 numba pandas lightning
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
import torch
from netcal.metrics import ECE
from probmetrics.metrics import Metrics

label = np.repeat([0, 1], 500)
p = np.tile([0.6, 0.2, 0.2], (1000, 1))
scores = Metrics.from_names(['ece-15']).compute_all_from_labels_probs(
  torch.as_tensor(label), torch.as_tensor(p)
)
error = float(scores['ece-15'])
print(f'probmetrics ece-15 {error:.3f}')
assert abs(error - 0.25) < 1e-3
try:
  ECE(15).measure(p, label)
except RuntimeError as refusal:
  print('netcal ECE:', refusal)
else:
  raise SystemExit('netcal takes it now')
PROGRAM
