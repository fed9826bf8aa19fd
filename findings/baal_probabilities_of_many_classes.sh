#!/usr/bin/env bash
# baal: probabilities that sum to 1 only up to rounding get a second softmax, so rows are picked nearly by chance.
#
# Version: baal 2.1.0, torch 2.14.1.
# Behaviour: its heuristics take logits or probabilities, and decide by the sums over classes: if one sum of the whole
#   array is not within 1e-5 of 1, a softmax is applied to all. float16 rounds more than that with ten classes, and sums
#   in float32 do with some ten thousand classes. A softmax of numbers between 0 and 1 is nearly uniform, so members of
#   an ensemble seem to agree everywhere. Nothing is said, and one row decides for all others.
# Output seen (BALD of 100 rows and ten members whose disagreement grows with the row; the mean, and the rank
#   correlation with the values of float64):
#   10 classes: float32 0.213, 1.00; float16 0.006, 0.97
#   1,000 classes: float32 0.425, 1.00; float16 0.001, 0.46
#   21,843 classes: float32 -0.000, 0.08; float16 0.031, 0.53
# Until it is right: probabilities in float64, divided by their sums, before they reach baal.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes some minutes, for it installs torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" baal==2.1.0 torch==2.14.1
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
import torch
from baal.active.heuristics import BALD
from scipy.stats import spearmanr


def softmax(logits, dtype):
  return torch.softmax(torch.tensor(logits, dtype=dtype), 1).numpy()


def of_baal(probabilities, right):
  scores = BALD().get_uncertainties(probabilities)  # [N]
  return float(scores.mean()), float(spearmanr(scores, right)[0])


for num_classes in (10, 1_000, 21_843):
  rng = np.random.default_rng(0)
  width = np.linspace(0.1, 2, 100)[:, None, None]
  logits = 3 * rng.normal(size=(100, num_classes, 1))
  logits = logits + width * rng.normal(size=(100, num_classes, 10))  # [N, K, S]
  exact = softmax(logits, torch.float64)
  mean = exact.mean(-1)
  right = (exact * np.log(exact)).sum(1).mean(-1) - (mean * np.log(mean)).sum(1)
  normal = of_baal(exact / exact.sum(1, keepdims=True), right)
  single = of_baal(softmax(logits, torch.float32), right)
  half = of_baal(softmax(logits, torch.float32).astype(np.float16), right)
  print(
    f'{num_classes:,} classes: float32 {single[0]:.3f}, {single[1]:.2f}; '
    f'float16 {half[0]:.3f}, {half[1]:.2f}'
  )
  assert abs(normal[0] - right.mean()) < 1e-3
  assert half[0] < 0.1 * right.mean()
  if num_classes < 10_000:
    assert abs(single[0] - right.mean()) < 1e-3
  else:
    assert single[0] < 0.1 * right.mean()
    assert abs(single[1]) < 0.3
PROGRAM
