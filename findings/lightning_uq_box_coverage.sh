#!/usr/bin/env bash
# lightning-uq-box: what it reports as the coverage of conformal sets is the accuracy, and their size is always 1.
#
# Version: lightning-uq-box 0.4.0, torch 2.14.1.
# Behaviour: `RAPS` predicts sets of classes, but its test step gives the probabilities to `EmpiricalCoverage` and
#   `SetSize`, which then take the first class of each row for the set. So sets that hold the label as often as they
#   promise seem to fail, and two methods that differ in their sets look alike. `reset()` of both metrics leaves their
#   counts, so that a second test on the same object reports the mean of both.
# Output seen (ten classes, sets that promise 90%):
#   Trainer.test: accuracy 0.442, coverage 0.442, size 1.0
#   the sets themselves: coverage 0.913, size 5.1
#   EmpiricalCoverage, four rows of which none is covered, reset, four that are: 0.5
# Until it is right: `EmpiricalCoverage()` of `predict_step(...)['pred_set']`, a new one for each test.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes some minutes, for it installs torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" lightning-uq-box==0.4.0 torch==2.14.1
cd "$folder"
venv/bin/python -W ignore - 2>messages <<'PROGRAM' || { cat messages; exit 1; }
import lightning
import torch
from lightning_uq_box.uq_methods import RAPS
from lightning_uq_box.uq_methods.metrics import EmpiricalCoverage


def rows():
  logits = 1.5 * torch.randn(2_000, 10)
  return logits, torch.distributions.Categorical(logits=logits).sample()


def batches(logits, label):
  pairs = zip(logits.split(200), label.split(200), strict=True)
  return torch.utils.data.DataLoader([{'input': x, 'target': y} for x, y in pairs], batch_size=None)


torch.manual_seed(0)
layer = torch.nn.Linear(10, 10, bias=False)
layer.weight.data = torch.eye(10)
raps = RAPS(torch.nn.Sequential(layer), alpha=0.1, kreg=2, lamda_param=0.01)
trainer = lightning.Trainer(
  accelerator='cpu',
  max_epochs=1,
  inference_mode=False,
  logger=False,
  enable_progress_bar=False,
  enable_checkpointing=False,
)
trainer.fit(raps, batches(*rows()))
test = rows()
(found,) = trainer.test(raps, batches(*test), verbose=False)
accuracy, coverage, size = (found[f'test{x}'] for x in ('Acc', 'Empirical Coverage', 'Set Size'))
print(f'Trainer.test: accuracy {accuracy:.3f}, coverage {coverage:.3f}, size {size}')
assert abs(coverage - accuracy) < 1e-6
assert size == 1
sets = raps.predict_step(test[0])['pred_set']
coverage = sum(int(y) in x.tolist() for x, y in zip(sets, test[1], strict=True)) / 2_000
size = sum(map(len, sets)) / 2_000
print(f'the sets themselves: coverage {coverage:.3f}, size {size:.1f}')
assert coverage > 0.87
assert size > 3

metric = EmpiricalCoverage()
metric.update([torch.tensor([0])] * 4, torch.tensor([1, 1, 1, 1]))
metric.reset()
metric.update([torch.tensor([0])] * 4, torch.tensor([0, 0, 0, 0]))
print('EmpiricalCoverage, four rows of which none is covered, reset, four that are:', float(metric.compute()))
assert metric.compute() == 0.5
PROGRAM
