#!/usr/bin/env bash
# torchmetrics: with equal scores, the ranking loss of many labels depends on the order of the classes.
#
# Version: torchmetrics 1.9.0, torch 2.14.1, scikit-learn 1.9.0.
# Behaviour: `MultilabelRankingLoss` ranks scores by sorting, so of equal ones the class that stands first in the columns
#   ranks lower. scikit-learn counts a wrong pair of equal scores as wrong. A sigmoid in bfloat16 is 1 from a logit of
#   about 6, so equal scores are common, and the loss is too small. `MultilabelRankingAveragePrecision` and
#   `MultilabelCoverageError` treat ties as scikit-learn does.
# Output seen:
#   equal scores throughout: 0.600, with the columns reversed 0.400, scikit-learn 1.000
#   sigmoid in bfloat16: 0.495, with the columns reversed 0.494, scikit-learn 0.561
#   sigmoid in float64: 0.492, with the columns reversed 0.492, scikit-learn 0.492
# Until it is right: logits in place of probabilities, in float32, or scikit-learn's `label_ranking_loss`.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes some minutes, for it installs torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" torchmetrics==1.9.0 torch==2.14.1 scikit-learn==1.9.0
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import torch
from sklearn.metrics import label_ranking_loss
from torchmetrics.functional.classification import multilabel_ranking_loss


def losses(name, scores, labels):
  num_labels = labels.shape[1]
  found = float(multilabel_ranking_loss(scores, labels, num_labels))
  flipped = float(multilabel_ranking_loss(scores.flip(1), labels.flip(1), num_labels))
  expected = label_ranking_loss(labels, scores.double())
  print(f'{name}: {found:.3f}, with the columns reversed {flipped:.3f}, scikit-learn {expected:.3f}')
  return found, flipped, expected


labels = torch.tensor([[1, 0, 0, 0]] * 3 + [[0, 0, 0, 1]] * 2)
found, flipped, expected = losses('equal scores throughout', torch.full((5, 4), 0.5), labels)
assert expected == 1 and abs(found - flipped) > 0.1 and found < 0.9

torch.manual_seed(0)
logits = 6 * torch.randn(1000, 50) + 4
labels = (torch.rand(1000, 50) < 0.2).long()
found, _, expected = losses('sigmoid in bfloat16', logits.bfloat16().sigmoid(), labels)
assert expected - found > 0.05
found, _, expected = losses('sigmoid in float64', logits.double().sigmoid(), labels)
assert abs(expected - found) < 1e-4
PROGRAM
