#!/usr/bin/env bash
# venn-abers: a class without calibration labels loses its column, and later classes move to the ids before theirs.
#
# Version: venn-abers 1.5.4.
# Behaviour: `VennAbersCalibrator.predict_proba` gives one column per class that the calibration labels have, in their
#   order, and does not say which these are. `argmax` of it is then a class id only up to the missing class. Rare
#   classes are often missing from a calibration split.
# Output seen (six classes, the calibration labels lack class 2):
#   columns: 6 in, 5 out
#   accuracy of argmax: 0.53 before, 0.28 after, 0.52 with the ids put back
# Until it is right: `np.unique(y_cal)[p.argmax(1)]`.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" venn-abers==1.5.4
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
from venn_abers import VennAbersCalibrator

rng = np.random.default_rng(0)
logits = 1.5 * rng.normal(size=(4000, 6))
logits[:, 2] -= 2  # rare
p = np.exp(logits)
p /= p.sum(1, keepdims=True)
labels = np.array([rng.choice(6, p=row) for row in p])
calibration = np.flatnonzero((np.arange(4000) < 2000) & (labels != 2))
test = np.arange(2000, 4000)
out = VennAbersCalibrator().predict_proba(
  p_cal=p[calibration], y_cal=labels[calibration], p_test=p[test]
)
right = labels[test]
before = (p[test].argmax(1) == right).mean()
after = (out.argmax(1) == right).mean()
mended = (np.unique(labels[calibration])[out.argmax(1)] == right).mean()
print(f'columns: 6 in, {out.shape[1]} out')
print(
  f'accuracy of argmax: {before:.2f} before, {after:.2f} after, {mended:.2f} with the ids put back'
)
assert out.shape[1] == 5
assert after < before - 0.15
assert mended > before - 0.1
PROGRAM
