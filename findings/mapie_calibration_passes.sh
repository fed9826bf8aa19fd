#!/usr/bin/env bash
# MAPIE: a p-value of 1 for a model that is not sure enough, and an ECE near 0 for any model whose mean is right.
#
# Version: mapie 1.6.0, scikit-learn 1.9.1.
# Behaviour: `spiegelhalter_p_value` is the area above the statistic. That is 0 for a model that is too sure, and 1 for
#   one that is not sure enough, whose statistic is far below 0. The p-values of Kolmogorov and Smirnov, and of Kuiper,
#   see both. `expected_calibration_error` with `split_strategy='array split'` cuts the rows into groups in the order in
#   which they come, and the largest confidence of each group is the edge of a bin. Nearly all rows are then below all
#   edges, in one bin, where too high and too low confidences cancel. Label smoothing, and averages over much noise,
#   make models that are not sure enough.
# Output seen (20,000 rows):
#   calibrated: p 0.914 (Kuiper 0.538), ECE 0.009, by 'array split' 0.001
#   too sure: p 0.000 (Kuiper 0.000), ECE 0.162, by 'array split' 0.001
#   not sure enough: p 1.000 (Kuiper 0.000), ECE 0.178, by 'array split' 0.003
# Until it is right: twice the smaller one of p and 1 - p, and 'quantile', or rows sorted by confidence.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" mapie==1.6.0 scikit-learn==1.9.1
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
from mapie.metrics.calibration import (
  expected_calibration_error,
  kuiper_p_value,
  spiegelhalter_p_value,
)

rng = np.random.default_rng(0)
true = rng.uniform(size=20_000)
correct = (rng.uniform(size=20_000) < true).astype(int)


def seen(name, confidence):
  p = spiegelhalter_p_value(correct, confidence)
  kuiper = kuiper_p_value(correct, confidence)
  ece = expected_calibration_error(correct, confidence, num_bins=15)
  split = expected_calibration_error(
    correct, confidence, num_bins=15, split_strategy='array split'
  )
  print(
    f"{name}: p {p:.3f} (Kuiper {kuiper:.3f}), ECE {ece:.3f}, by 'array split' {split:.3f}"
  )
  return p, kuiper, ece, split


p, kuiper, ece, split = seen('calibrated', true)
assert min(p, 1 - p, kuiper) > 0.01 and ece < 0.02 and split < 0.02
p, kuiper, ece, split = seen('too sure', np.clip(0.5 + 3 * (true - 0.5), 0.001, 0.999))
assert p < 1e-3 and kuiper < 1e-3 and ece > 0.1 and split < 0.02
p, kuiper, ece, split = seen('not sure enough', 0.5 + 0.3 * (true - 0.5))
assert p > 0.999 and kuiper < 1e-3 and ece > 0.1 and split < 0.02
PROGRAM
