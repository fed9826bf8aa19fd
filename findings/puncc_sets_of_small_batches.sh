#!/usr/bin/env bash
# puncc: a set has at most as many classes as the batch has examples, so that coverage falls in small batches.
#
# Version: puncc 0.8.0, numpy 2.5.5.
# Behaviour: `APS` and `RAPS` bound the number of classes in a set by the number of rows that `predict` is given, where
#   the number of classes is meant. A test set as a whole hides it. Served in batches, or where sets of many classes are
#   larger than a batch, labels are cut off and the promised coverage is lost. Nothing is said. `LAC` is right.
# Output seen (1,000 classes, a calibrated model, sets that promise 90%; coverage, classes of a set):
#   all 2,000 rows: 0.89, 405
#   batches of 128: 0.63, 126
#   batches of 16: 0.25, 16
# Until it is right: `APS` and `RAPS` on batches of more rows than classes: pad with copies.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" puncc==0.8.0 numpy==2.5.5
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
from deel.puncc.api.prediction import BasePredictor
from deel.puncc.classification import APS, LAC
from deel.puncc.metrics import classification_mean_coverage, classification_mean_size


class Given:
  """A model whose inputs are the probabilities that it predicts."""

  def fit(self, x, y):
    pass

  def predict(self, x):
    return x


def rows(rng):
  weight = np.exp(1.5 * rng.normal(size=(2_000, 1_000)))
  p = weight / weight.sum(1, keepdims=True)
  return p, np.minimum((p.cumsum(1) < rng.random((2_000, 1))).sum(1), 999)


rng = np.random.default_rng(0)
np.random.seed(0)
calibration, test = rows(rng), rows(rng)


def coverage(method, size):
  conformal = method(BasePredictor(Given(), is_trained=True), train=False)
  conformal.fit(X_calib=calibration[0], y_calib=calibration[1])
  sets = []
  for start in range(0, 2_000, size):
    sets += conformal.predict(test[0][start : start + size], alpha=0.1)[1]
  return classification_mean_coverage(test[1], sets), classification_mean_size(sets)


for size, name in ((2_000, 'all 2,000 rows'), (128, 'batches of 128'), (16, 'batches of 16')):
  found, classes = coverage(APS, size)
  print(f'{name}: {found:.2f}, {classes:.0f}')
  if size == 2_000:
    assert found > 0.87
  else:
    assert found < 0.8
    assert classes <= size
assert coverage(LAC, 16)[0] > 0.87
PROGRAM
