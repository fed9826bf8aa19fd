#!/usr/bin/env bash
# Hugging Face Datasets: `load_dataset` reads all Parquet files by the class names of the first one.
#
# Version: datasets 5.2.0.
# Behaviour: `to_parquet` writes the names of the classes into each file. Where files have the same names in another
#   order, `load_dataset` takes those of the first file for all of them and keeps the numbers. Rows of the other files,
#   or the whole test split, then have labels of other classes. Nothing is said, with `streaming=True` neither. Splits
#   or parts that were encoded one by one are such files. `concatenate_datasets` refuses the same two datasets. Numbers
#   outside of the names are a known fault (https://github.com/huggingface/datasets/issues/8596); here all are in range.
# Output seen (each file holds a cat, a dog and a fish, in this order):
#   train: cat, dog, fish
#   test: fish, cat, dog
#   both files as train: cat, dog, fish, fish, cat, dog
# Until it is right: one `Dataset.from_parquet` a file, and `align_labels_with_mapping`. het_plugin refuses such files.
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
animals = ['cat', 'dog', 'fish']
for file, names in (('a', ['cat', 'dog', 'fish']), ('b', ['dog', 'fish', 'cat'])):
  features = datasets.Features({'label': datasets.ClassLabel(names=names)})
  datasets.Dataset.from_dict({'label': animals}, features).to_parquet(f'{file}.parquet')


def names_of(files, split, **options):
  rows = datasets.load_dataset('parquet', data_files=files, split=split, **options)
  return [rows.features['label'].int2str(row['label']) for row in rows]


splits = {'train': 'a.parquet', 'test': 'b.parquet'}
print('train:', ', '.join(names_of(splits, 'train')))
assert names_of(splits, 'train') == animals
print('test:', ', '.join(names_of(splits, 'test')))
assert names_of(splits, 'test') == ['fish', 'cat', 'dog']
assert names_of(splits, 'test', streaming=True) == ['fish', 'cat', 'dog']
both = names_of(['a.parquet', 'b.parquet'], 'train')
print('both files as train:', ', '.join(both))
assert both == [*animals, 'fish', 'cat', 'dog']
alone = datasets.Dataset.from_parquet('b.parquet')
assert [alone.features['label'].int2str(x) for x in alone['label']] == animals
aligned = alone.align_labels_with_mapping({name: i for i, name in enumerate(animals)}, 'label')
assert aligned['label'][:] == [0, 1, 2]
PROGRAM
