#!/usr/bin/env bash
# torch-uncertainty: `VariationRatio` takes examples for members, so members that agree seem to disagree.
#
# Version: torch-uncertainty 0.13.0, torch 2.14.1.
# Behaviour: its docstring has probabilities [B, N, C] of B examples and N members, as the package's other metrics have.
#   Its update exchanges the two axes. What it returns is then how often examples of a batch differ in their class,
#   which is near 1 - 1 / C for every ensemble. Batches of one size are taken; a smaller last one is an error about
#   sizes. `Disagreement` and `MutualInformation` read the axes as written.
# Output seen (200 examples of 10 classes, 5 members):
#   members alike: variation ratio 0.865, disagreement 0.000
#   alike, axes exchanged by hand: variation ratio 0.000
#   members of their own: variation ratio 0.873, disagreement 0.910
# Until it is right: `update(probs.transpose(0, 1))`.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes some minutes, for it installs torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" torch-uncertainty==0.13.0 torch==2.14.1 \
  torchvision lightning rich scikit-learn
cd "$folder"
venv/bin/python -W ignore - 2>stderr <<'PROGRAM' || (cat stderr && exit 1)
import torch
from torch_uncertainty.metrics.classification import Disagreement, VariationRatio


def ratio(probs):
  metric = VariationRatio(probabilistic=False)
  metric.update(probs)
  return float(metric.compute())


def disagreement(probs):
  metric = Disagreement()
  metric.update(probs)
  return float(metric.compute())


torch.manual_seed(0)
one = torch.randn(200, 1, 10).softmax(-1)
alike = one.expand(-1, 5, -1)  # [B, N, C]
own = torch.randn(200, 5, 10).softmax(-1)
print(f'members alike: variation ratio {ratio(alike):.3f}, disagreement {disagreement(alike):.3f}')
print(f'alike, axes exchanged by hand: variation ratio {ratio(alike.transpose(0, 1)):.3f}')
print(
  f'members of their own: variation ratio {ratio(own):.3f}, disagreement {disagreement(own):.3f}'
)
assert disagreement(alike) == 0 and ratio(alike) > 0.7
assert ratio(alike.transpose(0, 1)) == 0
assert abs(ratio(alike) - ratio(own)) < 0.1
PROGRAM
