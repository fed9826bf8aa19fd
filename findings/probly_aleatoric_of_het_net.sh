#!/usr/bin/env bash
# probly: the aleatoric uncertainty of a heteroscedastic net leaves out the label noise that the net has learned.
#
# Version: probly 0.9.1, torch 2.14.1.
# Behaviour: samples of a `het_net` are draws of its label noise, and its docstring has "only capture aleatoric
#   uncertainty". What `decompose` returns is the mean entropy of the samples, as for an ensemble. The spread of the
#   samples, which is the noise, is left out: the more noise and the lower the temperature, the less uncertain the
#   labels seem. Where noise tells rows apart they are ranked the wrong way around, and nets of two temperatures cannot
#   be compared.
# Output seen (three classes of equal means, so labels have an entropy of log 3 = 1.099; standard deviation of the noise
#   over the temperature):
#   noise 0.1: aleatoric 1.095, entropy of the mean of the samples 1.099
#   noise 1: aleatoric 0.871, entropy of the mean of the samples 1.098
#   noise 10: aleatoric 0.141, entropy of the mean of the samples 1.098
# Until it is right: the entropy of `sample_mean()`. het_plugin's heads give the mean, and the entropy of that.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes some minutes, for it installs torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" probly==0.9.1 torch==2.14.1
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import torch
from probly.method.het_net import het_net
from probly.quantification import decompose
from probly.representer import representer
from torch import nn

torch.manual_seed(0)
for noise, low, high in ((0.1, 1.05, 1.1), (1, 0.7, 0.95), (10, 0.05, 0.25)):
  net = het_net(nn.Sequential(nn.Linear(4, 3)), predictor_type='logit_classifier')
  with torch.no_grad():
    for parameter in net.parameters():
      parameter.zero_()
    net[0].diag_layer.bias.fill_(noise).expm1_().log_()  # what a softplus takes to the noise
    samples = representer(net, num_samples=1_000)(torch.randn(100, 4))
    aleatoric = float(decompose(samples).aleatoric.mean())
    mean = samples.sample_mean().probabilities  # [100, 3]
    right = float(-(mean * mean.log()).sum(-1).mean())
  print(
    f'noise {noise}: aleatoric {aleatoric:.3f}, entropy of the mean of the samples {right:.3f}'
  )
  assert low < aleatoric < high
  assert 1.08 < right < 1.1
PROGRAM
