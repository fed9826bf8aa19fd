#!/usr/bin/env bash
# cleanlab: `generate_noisy_labels` leaves labels as they are where classes are many, whatever noise is asked for.
#
# Version: cleanlab 2.9.0, numpy 2.5.5.
# Behaviour: it moves a whole number of rows from each class to each other one, and cuts off the fraction; its docstring
#   has "exactly" and `round`. Noise that is spread over all other classes asks for less than one row per pair where the
#   rate times the rows of a class is less than the number of others. Such pairs get none. With the rows of CIFAR-100,
#   15% of noise are 0%, and 30% are 20%. Nothing is said, and methods are then compared on clean labels.
# Output seen (uniform noise; share of labels that are wrong):
#   10 classes of 5,000: 15% gives 14.9%, 30% gives 29.9%
#   100 classes of 500: 15% gives 0.0%, 30% gives 19.8%
#   1000 classes of 50: 15% gives 0.0%, 30% gives 0.0%
# Until it is right: draw each label from its column of the noise matrix, and measure the share. het_plugin's noisy
#   tasks draw by the number of the example.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" cleanlab==2.9.0 numpy==2.5.5
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
from cleanlab.benchmarking.noise_generation import generate_noisy_labels


def wrong(num_classes, rows, rate):
  true = np.repeat(np.arange(num_classes), rows)
  matrix = np.full((num_classes, num_classes), rate / (num_classes - 1))
  np.fill_diagonal(matrix, 1 - rate)
  return np.mean(generate_noisy_labels(true, matrix) != true)


cases = (
  (10, 5_000, (0.15, 0.3)),
  (100, 500, (0, 0.2)),
  (1_000, 50, (0, 0)),
)
for num_classes, rows, expected in cases:
  found = [wrong(num_classes, rows, rate) for rate in (0.15, 0.3)]
  print(
    f'{num_classes} classes of {rows:,}: 15% gives {100 * found[0]:.1f}%, '
    f'30% gives {100 * found[1]:.1f}%'
  )
  np.testing.assert_allclose(found, expected, atol=5e-3)
PROGRAM
