#!/usr/bin/env bash
# grain: with shards of unequal size, `IndexSampler` never gives the last record of the larger ones.
#
# Version: grain 0.2.18.
# Behaviour: `ShardOptions(drop_remainder=False)`, the default, is to share the remainder among the first shards. The
#   sampler knows where each shard begins, but ends it after a number of records divided by the number of shards. So one
#   pass over an evaluation split misses up to one record a process, and only the count says so. With two epochs a
#   smaller shard gives its first record three times.
# Output seen (all processes together):
#   7 records, 2 processes, 1 epoch: missing [3]
#   11 records, 4 processes, 1 epoch: missing [2, 5, 8]
#   7 records, 2 processes, 2 epochs: missing [], once [3], three times [4]
# Until it is right: repeat records until the processes divide their number, and weigh the copies by zero.
#   het_plugin.data takes the range of each process itself.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" grain==0.2.18
cd "$folder"
venv/bin/python - <<'PROGRAM'
import collections

import grain.python as grain


def seen(num_records, num_processes, num_epochs):
  counts = collections.Counter(dict.fromkeys(range(num_records), 0))
  for i in range(num_processes):
    sampler = grain.IndexSampler(
      num_records,
      grain.ShardOptions(i, num_processes, drop_remainder=False),
      num_epochs=num_epochs,
    )
    records = grain.RangeDataSource(0, num_records, 1)
    counts.update(int(x) for x in grain.DataLoader(data_source=records, sampler=sampler))
  return counts


for num_records, num_processes, expected in ((7, 2, [3]), (11, 4, [2, 5, 8])):
  counts = seen(num_records, num_processes, 1)
  missing = [x for x, count in counts.items() if count == 0]
  print(f'{num_records} records, {num_processes} processes, 1 epoch: missing {missing}')
  assert missing == expected
counts = seen(7, 2, 2)
by_count = {n: [x for x, count in counts.items() if count == n] for n in (0, 1, 3)}
print(
  f'7 records, 2 processes, 2 epochs: missing {by_count[0]}, once {by_count[1]}, '
  f'three times {by_count[3]}'
)
assert by_count == {0: [], 1: [3], 3: [4]}
PROGRAM
