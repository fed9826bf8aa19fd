#!/usr/bin/env bash
# grain: parts of a shuffled dataset mix as soon as one of them is repeated, so a model trains on its validation rows.
#
# Version: grain 0.2.18.
# Behaviour: `ds.seed(s).shuffle()` cut into `ds[:n]` and `ds[n:]` is a random split. In the second epoch of
#   `ds[:n].repeat(k)` the shuffle under the slice takes another permutation, and the slice cuts from that. After a few
#   epochs the training part has given every row. Nothing is said, and each epoch has the right number of rows.
# Output seen (ten rows, eight of them for training, three epochs):
#   validation: [2, 3]
#   training: epoch 1 has none of them, epochs 1 to 3 have [2, 3]
# Until it is right: split the indices yourself, and shuffle and repeat each part. het_plugin.data splits by hashes of
#   names.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" grain==0.2.18
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import grain

rows = grain.MapDataset.range(10).seed(42).shuffle()
train = rows[:8]
validation = sorted(int(x) for x in rows[8:])
print('validation:', validation)
first = {int(x) for x in train} & set(validation)
leaked = sorted({int(x) for x in train.repeat(3)} & set(validation))
print(f'training: epoch 1 has {sorted(first) or "none"} of them, epochs 1 to 3 have {leaked}')
assert not first
assert leaked == validation
PROGRAM
