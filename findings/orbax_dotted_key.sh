#!/usr/bin/env bash
# orbax: of a key 'a.b' and a nested a, b only one array is saved, and both are restored from it.
#
# Version: orbax-checkpoint 0.12.8, jax 0.12.0.1.
# Behaviour: `StandardCheckpointer` names an array by its path with dots. {'a.b': x, 'a': {'b': y}} has one name twice:
#   one array overwrites the other, and restoring gives both places the same values, without a word. Keys that are
#   ints become text, so that a tree restored without a target has another structure than the one saved.
# Output seen:
#   saved    {'a': {'b': [1, 1]}, 'a.b': [0, 0]}
#   restored {'a': {'b': [1, 1]}, 'a.b': [1, 1]}
#   saved    {1: [0, 0]}
#   restored {'1': [0, 0]}
# Until it is right: no dots in keys, no ints as keys.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" orbax-checkpoint==0.12.8 jax==0.12.0.1
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PROGRAM'
import os

import jax
import numpy as np
import orbax.checkpoint as ocp


def restored(name, tree):
  path = os.path.abspath(name)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, tree)
  with ocp.StandardCheckpointer() as checkpointer:
    found = checkpointer.restore(path)
  for what, x in {'saved   ': tree, 'restored': found}.items():
    print(what, jax.tree.map(lambda x: np.asarray(x, int).tolist(), x))
  return found


zeros = np.zeros(2)
ones = np.ones(2)
found = restored('dotted', {'a.b': zeros, 'a': {'b': ones}})
np.testing.assert_array_equal(found['a.b'], found['a']['b'])
assert list(restored('ints', {1: zeros})) == ['1']
PROGRAM
