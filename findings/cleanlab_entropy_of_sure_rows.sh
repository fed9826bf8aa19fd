#!/usr/bin/env bash
# cleanlab: `confidence_weighted_entropy` takes labels that a sure model contradicts for the best, and right ones for bad.
#
# Version: cleanlab 2.9.0.
# Behaviour: the score is log(1 + x) / x, where x is the entropy over the probability of the label. Both that probability
#   and the x below the line have a lower bound of 1e-6, and the x above it has none. Where a model is sure, by a margin of
#   logits of about 18 or more, x of a right label falls below the bound and its score goes to 0. The bounded probability
#   of a wrong label makes its x small, too, and its score goes to 1. Logits of networks that have fitted their rows have
#   such margins. Ranking by this score then begins with right labels.
# Output seen (ten classes, the first has the margin):
#   margin 10: label of the first class 0.999, of another 0.088
#   margin 18: label of the first class 1.000, of another 0.669
#   margin 25: label of the first class 0.001, of another 0.999
# Until it is right: `self_confidence` or `normalized_margin`.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" cleanlab==2.9.0 scikit-learn==1.9.0 scipy
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
from cleanlab.rank import get_label_quality_scores
from scipy.special import softmax

scores = {}
for margin in (10, 18, 25):
  p = np.tile(softmax(np.eye(10)[0] * margin), (2, 1))
  scores[margin] = get_label_quality_scores(
    np.array([0, 1]), p, method='confidence_weighted_entropy'
  )
  right, wrong = scores[margin]
  print(f'margin {margin}: label of the first class {right:.3f}, of another {wrong:.3f}')
assert scores[10][0] > 0.99
assert scores[10][1] < 0.1
assert scores[25][0] < 0.01
assert scores[25][1] > 0.99
PROGRAM
