"""Trains examples/kauldron_config.py in Kauldron, with small batches.

Arguments: a folder, and the steps at which the run stops; after each but the last one it resumes.
"""

import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / 'examples' / 'kauldron_config.py'
STEPS = 4


def config(folder):
  cfg = runpy.run_path(str(EXAMPLE))['get_config']()
  cfg.workdir = str(folder)
  cfg.num_train_steps = STEPS
  cfg.train_ds.batch_size = 16
  cfg.log_metrics_every = cfg.log_summaries_every = cfg.checkpointer.save_interval_steps = 1
  cfg.evals.eval.run.n = STEPS
  return cfg


if __name__ == '__main__':
  from kauldron import konfig

  folder, *stops = sys.argv[1:]
  for stop in stops:
    cfg = config(folder)
    cfg.stop_after_steps = int(stop)
    konfig.resolve(cfg).train()
