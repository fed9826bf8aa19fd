#!/usr/bin/env bash
# torchmetrics: macro averages count a class without labels as 0, for average precision only if `thresholds` are given.
#
# Version: torchmetrics 1.9.0, torch 2.14.1.
# Behaviour: `MulticlassAveragePrecision` leaves classes without labels out of the mean. With `thresholds`, which
#   save memory, they count as 0, without a warning. `MulticlassAUROC` counts them as 0 either
#   way. Twenty thousand classes and five thousand labels leave most classes without one.
# Output seen (20 classes, labels of 15 of them, no information):
#   average precision: 0.083, with 1,000 thresholds 0.062
#   AUROC: 0.394, with 1,000 thresholds 0.394
# Until it is right: `average='none'`, and the mean over the classes that have labels.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes some minutes, for it installs torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" torchmetrics==1.9.0 torch==2.14.1
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import torch
from torchmetrics.functional import classification

torch.manual_seed(0)
p = torch.rand(500, 20).softmax(1)
labels = torch.randint(0, 15, (500,))
found = {}
for name, metric in (
  ('average precision', classification.multiclass_average_precision),
  ('AUROC', classification.multiclass_auroc),
):
  exact = float(metric(p, labels, 20))
  binned = float(metric(p, labels, 20, thresholds=1_000))
  found[name] = exact, binned
  print(f'{name}: {exact:.3f}, with 1,000 thresholds {binned:.3f}')
exact, binned = found['average precision']
assert abs(binned / exact - 15 / 20) < 0.03
assert max(found['AUROC']) < 0.45
PROGRAM
