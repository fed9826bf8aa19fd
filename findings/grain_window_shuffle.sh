#!/usr/bin/env bash
# grain: a shuffle in windows loses records of the last window, and gives the first records twice.
#
# Version: grain 0.2.18.
# Behaviour: `experimental.WindowShuffleMapDataset` draws a permutation of a whole window also where the last one is not
#   full. Positions beyond the end wrap around to the first records. Its docstring has "a one-to-one mapping". The length is
#   right, so nothing shows. A data set that is smaller than the window loses records throughout.
#   `WindowShuffleIterDataset` gives each record once.
# Output seen (windows of 64, mean of 20 seeds):
#   1,000 records: 15.1 missing, of 40 in the last window
#   1,024 records: 0.0 missing
#   1,000 records, WindowShuffleIterDataset: 0.0 missing
# Until it is right: a window that divides the number of records, or `WindowShuffleIterDataset`.
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
from grain import experimental


def missing(num_records, shuffle):
  lost = 0
  for seed in range(20):
    given = [int(x) for x in shuffle(num_records, seed)]
    assert len(given) == num_records
    lost += num_records - len(set(given))
  return lost / 20


def of_map(num_records, seed):
  return experimental.WindowShuffleMapDataset(
    grain.MapDataset.range(num_records), window_size=64, seed=seed
  )


def of_iter(num_records, seed):
  return experimental.WindowShuffleIterDataset(
    grain.MapDataset.range(num_records).to_iter_dataset(), window_size=64, seed=seed
  )


uneven = missing(1_000, of_map)
even = missing(1_024, of_map)
streamed = missing(1_000, of_iter)
print(f'1,000 records: {uneven:.1f} missing, of {1_000 % 64} in the last window')
print(f'1,024 records: {even:.1f} missing')
print(f'1,000 records, WindowShuffleIterDataset: {streamed:.1f} missing')
assert uneven > 5
assert even == streamed == 0
PROGRAM
