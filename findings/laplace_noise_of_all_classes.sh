#!/usr/bin/env bash
# laplace-torch: its default probabilities are softened by noise that moves all classes together and so moves nothing.
#
# Version: laplace-torch 0.3, torch 2.14.1.
# Behaviour: a softmax does not see a constant that is added to all logits. So the data say nothing about weights that
#   do only this, and their posterior is the prior. `link_approx='probit'`, the default, divides each logit by a factor
#   of its own variance, and most of that is the common noise. What softens the probabilities is then the prior, as a
#   temperature would, and not what the posterior says of the classes. The samples of `link_approx='mc'`, with a full or
#   Kronecker covariance, cancel it. 'bridge' subtracts it.
# Output seen (weights of the last layer, full covariance; standard deviations of logits; mean confidence on test rows):
#   2 classes: common noise 3.3, of a difference 0.8; without noise 0.897, mc 0.888, probit 0.794
#   5 classes: common noise 2.2, of a difference 1.3; without noise 0.787, mc 0.761, probit 0.663
# Until it is right: `link_approx='mc'` with many samples as the baseline of a head, or the covariance of differences.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes some minutes, for it installs torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" laplace-torch==0.3 torch==2.14.1
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import torch
from laplace import Laplace
from torch import nn


def confidences(num_classes):
  torch.manual_seed(0)
  w = torch.randn(8, num_classes)

  def rows(n):
    x = torch.randn(n, 8)
    return x, torch.distributions.Categorical(logits=x @ w).sample()

  x, label = rows(1_000)
  test_x, _ = rows(2_000)
  net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, num_classes))
  adam = torch.optim.Adam(net.parameters(), 1e-2)
  for _ in range(300):
    adam.zero_grad()
    nn.functional.cross_entropy(net(x), label).backward()
    adam.step()

  posterior = Laplace(
    net, 'classification', subset_of_weights='last_layer', hessian_structure='full'
  )
  batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, label), 100)
  posterior.fit(batches)
  logits = posterior.functional_samples(test_x, n_samples=1_000)  # [S, B, K]
  common = float(logits.mean(-1).std(0).mean())
  difference = float((logits[..., 0] - logits[..., 1]).std(0).mean())
  exact = float(posterior(test_x, link_approx='mc', n_samples=2_000).amax(1).mean())
  probit = float(posterior(test_x).amax(1).mean())
  without = float(net(test_x).softmax(1).amax(1).mean())
  print(
    f'{num_classes} classes: common noise {common:.1f}, of a difference {difference:.1f}; '
    f'without noise {without:.3f}, mc {exact:.3f}, probit {probit:.3f}'
  )
  return common, difference, without - exact, without - probit


for num_classes in (2, 5):
  common, difference, exact, probit = confidences(num_classes)
  assert common > difference
  assert probit > 3 * abs(exact)
PROGRAM
