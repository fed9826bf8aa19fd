#!/usr/bin/env bash
# Hugging Face Datasets: `class_encode_column` gives each split ids of its own, and sorts numbers as text.
#
# Version: datasets 5.2.0.
# Behaviour: it is the usual step before `train_test_split(stratify_by_column=...)`. A `DatasetDict` encodes one split
#   after the other, each by the names that it has itself. A split without one of the classes moves all later ids, and a
#   model is then compared with labels of other classes. Labels that are ids already become text and are sorted: of
#   0 to 10, the label 10 becomes 2 and 2 becomes 3. Nothing is said, and all ids are in range.
# Output seen:
#   train: a, b, c are 0, 1, 2
#   test: b, c are 0, 1
#   0 to 10 become [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 2]
# Until it is right: `cast_column` with one `ClassLabel(names=...)` for text, and `ClassLabel(num_classes=...)` for ids.
#   het_plugin compares the names of the splits of Parquet files.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" datasets==5.2.0
cd "$folder"
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 venv/bin/python - <<'PROGRAM'
import datasets

datasets.disable_progress_bars()
names = {'train': ['a', 'b', 'c'], 'test': ['b', 'c']}
splits = datasets.DatasetDict(
  {split: datasets.Dataset.from_dict({'label': x}) for split, x in names.items()}
)
ids = {split: rows['label'][:] for split, rows in splits.class_encode_column('label').items()}
for split, found in ids.items():
  print(f'{split}: {", ".join(names[split])} are {", ".join(map(str, found))}')
assert ids == {'train': [0, 1, 2], 'test': [0, 1]}
numbers = datasets.Dataset.from_dict({'label': list(range(11))})
found = numbers.class_encode_column('label')['label'][:]
print('0 to 10 become', found)
assert found == [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 2]
PROGRAM
