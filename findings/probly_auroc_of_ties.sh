#!/usr/bin/env bash
# probly: with equal scores, its AUROC of out-of-distribution rows is too good: of equal ones they come first.
#
# Version: probly 0.9.1, scikit-learn 1.9.1.
# Behaviour: `roc_curve` has a point for each row, also where rows have one score, and takes them in the order of a
#   sort. numpy and jax arrays are sorted upwards and reversed, so of equal scores the last one comes first.
#   `evaluate_ood` puts rows from outside after the others: scores that say nothing find all of them. With torch tensors
#   it is the reverse. Average precision and the false positive rate at 95% have the same fault. Confidences of a sure
#   model are often equal: 1 - p is 0 from a margin of logits of 17 in float32, and of 6 in bfloat16.
# Output seen (AUROC, average precision and false positive rate of `evaluate_ood`; 2,000 rows each; nothing tells
#   outside from inside, so 0.5, 0.5 and 0.95 are right):
#   one score for all: 1.000, 1.000, 0.000; scikit-learn 0.500
#   a sure model, 1 - p in float32: 0.884, 0.754, 0.125; scikit-learn 0.506
#   a sure model, 1 - p in float64: 0.506, 0.505, 0.940; scikit-learn 0.506
# Until it is right: `roc_auc_score` and `roc_curve` of scikit-learn, as het_plugin has them.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" probly==0.9.1 scikit-learn==1.9.1
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
from probly.evaluation.ood import evaluate_ood
from scipy.special import softmax
from sklearn.metrics import roc_auc_score


def scores(name, inside, outside):
  found = evaluate_ood(inside, outside, 'all')
  right = roc_auc_score(np.arange(4_000) >= 2_000, np.concatenate((inside, outside)))
  numbers = ', '.join(f'{found[x]:.3f}' for x in ('auroc', 'aupr', 'fpr'))
  print(f'{name}: {numbers}; scikit-learn {right:.3f}')
  assert abs(right - 0.5) < 0.03
  return found


rng = np.random.default_rng(0)
logits = 4 * rng.normal(size=(4_000, 10))
logits[:, 0] += 28
found = scores('one score for all', np.zeros(2_000), np.zeros(2_000))
assert found == {'auroc': 1.0, 'aupr': 1.0, 'fpr': 0.0}
for dtype, low, high in ((np.float32, 0.7, 0.95), (np.float64, 0.47, 0.53)):
  uncertain = 1 - softmax(logits.astype(dtype), 1).max(1)
  found = scores(f'a sure model, 1 - p in {dtype.__name__}', uncertain[:2_000], uncertain[2_000:])
  assert low < found['auroc'] < high
PROGRAM
