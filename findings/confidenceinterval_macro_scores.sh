#!/usr/bin/env bash
# confidenceinterval: intervals of a macro F1 are too wide with two classes, and a quarter as wide as right with 100.
#
# Version: confidenceinterval 1.0.5, scikit-learn 1.9.1.
# Behaviour: `f1_score(average='macro')` has its variance from a paper, by the docstring. What it returns is more than
#   twice the right width with two classes. It shrinks as classes come in, and with a hundred most 95% intervals do not
#   hold the true value. Micro averages and accuracy are right. So two models whose macro F1 over many classes differ by
#   chance look different. Macro recall and precision have a formula of their own, whose widths are off by less.
# Output seen (95% intervals of 200 data sets: share that holds the true value, half the width over 1.96 standard
#   deviations of the scores):
#   2 classes, 500 rows: macro F1 1.00, 2.50; micro F1 0.94, 0.99
#   10 classes, 5,000 rows: macro F1 0.94, 0.96; micro F1 0.96, 1.05
#   100 classes, 5,000 rows: macro F1 0.38, 0.28; micro F1 0.95, 1.02
# Until it is right: `method='bootstrap_percentile'`, or an interval of differences of paired rows.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" confidenceinterval==1.0.5 scikit-learn==1.9.1
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import confidenceinterval
import numpy as np
from sklearn import metrics


def data_set(rng, num_classes, num_rows):
  label = rng.integers(num_classes, size=num_rows)
  guess = rng.integers(num_classes, size=num_rows)
  return label, np.where(rng.random(num_rows) < 0.8, label, guess)


def intervals(num_classes, num_rows, average):
  rng = np.random.default_rng(0)
  truth = metrics.f1_score(*data_set(rng, num_classes, 1_000_000), average=average)
  found = [
    confidenceinterval.f1_score(*data_set(rng, num_classes, num_rows), average=average)
    for _ in range(200)
  ]
  scores = np.array([score for score, _ in found])
  ends = np.array([end for _, end in found])  # [200, 2]
  held = np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
  return held, np.mean(ends[:, 1] - ends[:, 0]) / 2 / 1.96 / scores.std()


for num_classes, num_rows, low, high in ((2, 500, 2, 3), (10, 5_000, 0.9, 1.3), (100, 5_000, 0.2, 0.4)):
  macro = intervals(num_classes, num_rows, 'macro')
  micro = intervals(num_classes, num_rows, 'micro')
  print(
    f'{num_classes} classes, {num_rows:,} rows: macro F1 {macro[0]:.2f}, {macro[1]:.2f}; '
    f'micro F1 {micro[0]:.2f}, {micro[1]:.2f}'
  )
  assert low < macro[1] < high
  assert 0.85 < micro[1] < 1.15
assert macro[0] < 0.6
PROGRAM
