#!/usr/bin/env bash
# TFDS: in a slice with a number of records and a percentage, the number is taken for percent.
#
# Version: tensorflow-datasets 4.9.10.
# Behaviour: 'train[50:100%]' begins at 50% of the split, not at record 50, and 'train[10%:50]' ends at 50%. Nothing is
#   said, unless the number is above 100: then the error speaks of an incompatible slice.
# Output seen (of 1,000 records):
#   train[50:100%]: records 500 to 1000
#   train[10%:50]: records 100 to 500
#   train[50:]: records 50 to 1000
# Until it is right: one unit per slice. het_plugin refuses a slice with two.
#
# Fails if this changes. Needs uv, a Python of 3.11 to 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" tensorflow-datasets==4.9.10
cd "$folder"
venv/bin/python - <<'PROGRAM'
import tensorflow_datasets as tfds

split = tfds.core.SplitInfo(name='train', shard_lengths=[1000], num_bytes=0)
for text, expected in (
  ('train[50:100%]', (500, 1000)),
  ('train[10%:50]', (100, 500)),
  ('train[50:]', (50, 1000)),
):
  (part,) = tfds.core.ReadInstruction.from_spec(text).to_absolute({'train': split})
  found = part.from_ or 0, part.to or 1000
  print(f'{text}: records {found[0]} to {found[1]}')
  assert found == expected
PROGRAM
