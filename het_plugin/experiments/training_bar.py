"""A progress bar of a training run, from what the run writes."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from het_plugin import reporting
from het_plugin.training import run_files

_SECONDS = 0.5  # between two looks at the file


@contextlib.contextmanager
def shown(title: str, run_dir: Path, steps: int, batch_size: int) -> Iterator[None]:
  """Shows how far the training in `run_dir` has come while the context is entered.

  The training itself knows nothing of it: a thread reads the loss from metrics.jsonl.

  Args:
    title: stands before the bar.
    run_dir: of the run.
    steps: at the end of the run.
    batch_size: examples per step.
  """
  step, _ = _newest(run_dir)
  over = threading.Event()
  with reporting.Progress(
    title, steps * batch_size, step * batch_size, unit='examples'
  ) as progress:
    thread = threading.Thread(
      target=_follow, args=(run_dir, batch_size, progress, over), name='training bar', daemon=True
    )
    thread.start()
    try:
      yield
    finally:
      over.set()
      thread.join()


def _follow(
  run_dir: Path, batch_size: int, progress: reporting.Progress, over: threading.Event
) -> None:
  while not over.wait(_SECONDS):
    step, loss = _newest(run_dir)
    if step * batch_size > progress.count:
      progress.update(step * batch_size - progress.count, f'loss {loss:.3f}')


def _newest(run_dir: Path) -> tuple[int, float]:
  """Step and loss of the last training metrics; step 0 where there are none."""
  path, found = run_dir / 'metrics.jsonl', (0, float('nan'))
  for line in run_files.read_lines(path, lambda _: None, run_files.TAIL_BYTES):
    if line.get('train/loss') is not None:
      found = line['step'], line['train/loss']
  return found
