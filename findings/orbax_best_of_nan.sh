#!/usr/bin/env bash
# orbax: a checkpoint whose metric is NaN is the best one, so a run that diverges deletes its good checkpoints.
#
# Version: orbax-checkpoint 0.12.8, jax 0.12.0.1.
# Behaviour: `CheckpointManager` with `best_fn` sorts checkpoints by their metric and keeps the last `max_to_keep` of
#   them. A NaN is neither below nor above a number, so it stays where the sort meets it, and the newest stands last.
#   With 'min' and with 'max', `best_step` is then the checkpoint of the NaN, and as many of them as are kept push out
#   all others. One NaN among good values leaves the order to the sort, which differs between Python 3.12 and 3.13. An
#   infinite metric is sorted as it should be. The policy `BestN` does the same.
# Output seen (a loss of 0.5, 0.4, 0.6 and three more; two are kept):
#   then 0.7, 0.8, 0.9: kept [0, 1], best 1
#   then nan, nan, nan: kept [4, 5], best 5
#   then inf, inf, inf: kept [0, 1], best 1
# Until it is right: a `best_fn` that makes an infinite value of NaN, the worst one.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" orbax-checkpoint==0.12.8 jax==0.12.0.1
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PROGRAM'
import logging
import tempfile
from math import inf, nan

logging.disable(logging.WARNING)

import numpy as np
import orbax.checkpoint as ocp


def kept(*losses):
  options = ocp.CheckpointManagerOptions(
    best_fn=lambda metrics: metrics['loss'],
    best_mode='min',
    max_to_keep=2,
    enable_async_checkpointing=False,
  )
  with ocp.CheckpointManager(tempfile.mkdtemp(dir='.'), options=options) as manager:
    for step, loss in enumerate((0.5, 0.4, 0.6, *losses)):
      tree = {'w': np.full(2, step)}
      manager.save(step, args=ocp.args.StandardSave(tree), metrics={'loss': loss})
    steps = list(manager.all_steps())
    print(f'then {", ".join(map(str, losses))}: kept {steps}, best {manager.best_step()}')
    return steps, manager.best_step()


assert kept(0.7, 0.8, 0.9) == ([0, 1], 1)
assert kept(nan, nan, nan) == ([4, 5], 5)
assert kept(inf, inf, inf) == ([0, 1], 1)
PROGRAM
