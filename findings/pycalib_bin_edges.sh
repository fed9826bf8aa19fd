#!/usr/bin/env bash
# pycalib: a confidence on the edge of a bin is in no bin, and counts as calibrated.
#
# Version: pycalib 0.1.0.dev6, numpy 2.5.5.
# Behaviour: `conf_ECE` has 15 bins by default. Where the edge that it computes is the confidence itself, the example is
#   left out of the sum, but not out of its denominator. Shares of votes are such confidences: those of 15 nearest
#   neighbours, or of the members of an ensemble. Which of them are lost depends on the rounding of the edges.
# Output seen (accuracy 0.5 throughout, so the error is |confidence - 0.5|):
#   confidence 0.79 0.290
#   confidence 0.80 0.000
#   confidence 0.40 0.000
#   votes of 15: 0.086, by hand 0.122
# Until it is right: another number of bins, of which no confidence is a multiple, or another library.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" pycalib==0.1.0.dev6 numpy==2.5.5
cd "$folder"
venv/bin/python - <<'PROGRAM'
import numpy as np
from pycalib.metrics import conf_ECE

label = np.repeat([0, 1], 500)
errors = {}
for confidence in (0.79, 0.8, 0.4):
  p = np.full((1000, 3), (1 - confidence) / 2)
  p[:, 0] = confidence
  errors[confidence] = conf_ECE(label, p)
  print(f'confidence {confidence:.2f} {errors[confidence]:.3f}')

rng = np.random.default_rng(0)
votes = rng.multinomial(15, [0.7, 0.2, 0.1], size=5000) / 15
label = np.array([rng.choice(3, p=p) for p in rng.dirichlet([3, 1, 1], 5000)])
confidence = votes.max(1)
correct = votes.argmax(1) == label
by_hand = sum(
  np.mean(confidence == c) * abs(correct[confidence == c].mean() - c) for c in np.unique(confidence)
)
found = conf_ECE(label, votes)
print(f'votes of 15: {found:.3f}, by hand {by_hand:.3f}')
assert abs(errors[0.79] - 0.29) < 1e-6
assert errors[0.8] == errors[0.4] == 0
assert found < 0.75 * by_hand
PROGRAM
