#!/usr/bin/env bash
# MAPIE: `top_label_ece` weighs a class that was predicted once as much as one that was predicted ten thousand times.
#
# Version: mapie 1.6.0, scikit-learn 1.9.0.
# Behaviour: the paper that it cites (Gupta and Ramdas 2021, https://arxiv.org/abs/2107.08353) takes the expectation over
#   examples, so that each predicted class counts by its share. MAPIE takes the plain mean over the classes that are
#   predicted at all. With many classes and few rows it measures the classes that were hit by accident.
# Output seen (10,000 rows whose confidence 0.8 is right, and one row of another class with 0.9 that is wrong):
#   top_label_ece 0.450, over examples 0.0001
# Until it is right: the error of each class, weighted by the number of its predictions.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" mapie==1.6.0 scikit-learn==1.9.0
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
from mapie.metrics.calibration import top_label_ece

p = np.array([[0.8, 0.1, 0.1]] * 10_000 + [[0.05, 0.9, 0.05]])
label = np.array([0] * 8_000 + [2] * 2_001)
top = p.argmax(1)
confidence = p.max(1)
over_examples = sum(
  np.mean(top == k) * abs(np.mean(label[top == k] == k) - confidence[top == k].mean())
  for k in np.unique(top)
)
found = top_label_ece(label, p)
print(f'top_label_ece {found:.3f}, over examples {over_examples:.4f}')
assert abs(found - 0.45) < 1e-6
assert over_examples < 1e-3
PROGRAM
