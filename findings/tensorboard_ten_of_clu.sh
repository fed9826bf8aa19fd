#!/usr/bin/env bash
# TensorBoard: of all that clu wrote, `EventAccumulator` returns ten steps, drawn by chance.
#
# Version: tensorboard 2.21.0, clu 0.0.12, tensorflow 2.21.0.
# Behaviour: scripts that read curves take `EventAccumulator(folder)`. It keeps 10,000 scalars a name, but ten tensors,
#   and tf.summary, by which clu and flax write, makes a tensor of each scalar. So `Tags()['scalars']` is empty, and
#   `Tensors(name)` has ten random steps and looks like a curve. The smallest loss among them is not that of the run.
#   After a resume both values of a step that was run twice are there, the older one first.
# Output seen (1,000 steps; then a run of steps 0 to 99 that begins again at 50):
#   scalars: []
#   steps kept: [225, 304, 352, 505, 668, 789, 818, 924, 929, 999]
#   with size_guidance={'tensors': 0}: 1000 steps
#   resumed: 200 values of 150 steps
# Until it is right: `size_guidance={'tensors': 0}`, and a dictionary by step, in which the later value wins.
#
# Fails if this changes. Needs uv, a Python of 3.11 to 3.13 and a network; takes two minutes, for TensorFlow.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" tensorboard==2.21.0 clu==0.0.12 tensorflow==2.21.0
cd "$folder"
TF_CPP_MIN_LOG_LEVEL=3 venv/bin/python -W ignore - 2>stderr <<'PROGRAM' || (cat stderr && exit 1)
import time

from clu import metric_writers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def write(folder, steps):
  writer = metric_writers.SummaryWriter(folder)
  for step in steps:
    writer.write_scalars(step, {'loss': 1.0})
  writer.close()


def steps_read(folder, **settings):
  events = EventAccumulator(folder, **settings).Reload()
  return events.Tags()['scalars'], [event.step for event in events.Tensors('loss')]


write('once', range(1_000))
scalars, kept = steps_read('once')
_, every = steps_read('once', size_guidance={'tensors': 0})
print(f'scalars: {scalars}')
print(f'steps kept: {kept}')
print(f"with size_guidance={{'tensors': 0}}: {len(every)} steps")
assert scalars == [] and len(kept) == 10 and every == list(range(1_000))

write('resumed', range(100))
time.sleep(1.5)  # names of files have seconds
write('resumed', range(50, 150))
_, steps = steps_read('resumed', size_guidance={'tensors': 0})
print(f'resumed: {len(steps)} values of {len(set(steps))} steps')
assert len(steps) == 200 and len(set(steps)) == 150
PROGRAM
