#!/usr/bin/env bash
# Hugging Face Datasets: a label of digits that is no class name is taken for the id of another class.
#
# Version: datasets 5.2.0.
# Behaviour: `ClassLabel` looks a text up among its names. A text that is none of them is an error, unless it is a number
#   below the number of classes: then it is the id. With grades, ratings or sizes as names, a label that should not be
#   there becomes a row of another class. `cast_column`, `map` and `from_dict` with features all do this.
# Output seen (names '1', '2', '4', '5'):
#   the label '3' becomes the class '5'
#   the label '0' becomes the class '1'
#   the label '7' is refused
# Until it is right: compare `set(dataset.unique(column))` with the names before the cast.
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
grades = datasets.ClassLabel(names=['1', '2', '4', '5'])


def class_of(label):
  rows = datasets.Dataset.from_dict({'label': [label]}).cast_column('label', grades)
  return grades.int2str(rows['label'][0])


for label, expected in (('3', '5'), ('0', '1')):
  found = class_of(label)
  print(f'the label {label!r} becomes the class {found!r}')
  assert found == expected
try:
  class_of('7')
except ValueError:
  print("the label '7' is refused")
else:
  raise SystemExit("the label '7' is accepted")
PROGRAM
