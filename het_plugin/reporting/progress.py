"""Progress of a long loop: a bar on a terminal, elsewhere a line every ten seconds."""

import datetime
import math
import sys
import time
from typing import TextIO

import jax
from rich import progress
from rich.console import Console

_REFRESH_SECONDS = 0.1


class Progress:
  """Counts towards a total on stderr, shown by process 0 only; a context manager.

      with Progress('train', total=50_000) as progress:
        progress.update(256)

  Attributes:
    count: the count so far.
  """

  def __init__(
    self,
    title: str,
    total: int,
    done: int = 0,
    unit: str = 'images',
    seconds: float = 10.0,
    stream: TextIO | None = None,
    shown: bool = True,
    first: float | None = None,
  ):
    """Starts at `done`, which the rate leaves out.

    It also leaves out a first update of at most a tenth of what is left, because most loops compile
    in it; the next one shows both.

    Two lines are at least `seconds` apart: without a terminal, math.inf shows nothing. A loop that
    ends before `first` seconds shows nothing; None is a bar at once, and a line after `seconds`.
    """
    self._stream = sys.stderr if stream is None else stream
    self._title = title
    self._total = total
    self._unit = unit
    self._start_count = self.count = self._done = done
    self._shown = shown and jax.process_index() == 0
    self._start = time.monotonic()
    self._bar = None
    self._pause = seconds
    self._first = first
    if self._shown and self._stream.isatty():
      self._bar = _bar(self._stream)
      self._pause = _REFRESH_SECONDS
      self._bar.add_task(title, total=total, completed=done, behind=unit)
      if first is None:
        self._bar.start()
    is_default = first is None or self._pause == math.inf
    self._next = self._start + (self._pause if is_default else first)

  def update(self, number: int = 1, note: str = '', left: float | None = None) -> None:
    """Adds to the count.

    Args:
      number: what is added.
      note: shown behind it, such as a loss.
      left: about how much is left, where a loop may end before its total; None is all of it.
    """
    now = time.monotonic()
    if self.count == self._done and number <= (self._total - self.count) / 10:
      self._start = now
      self._start_count = self.count + number
      if self._first is None:
        self._next = max(self._next, now + self._pause)
    self.count += number
    if self.count == self._start_count or not self._shown or now < self._next:
      return
    self._next = now + self._pause
    rate = (self.count - self._start_count) / max(now - self._start, 1e-9)
    still = max(0, self._total - self.count)
    still = still if left is None else min(still, left)
    eta = datetime.timedelta(seconds=round(still / max(rate, 1e-9)))
    shown = f'{rate:,.0f}' if rate >= 10 else f'{rate:.2g}'
    behind = ', '.join(filter(None, [f'{self._unit}, {shown}/s', note, f'ETA {eta}']))
    if self._bar is None:
      line = f'{self._title}: {self.count:,} of {self._total:,} {behind}'
      print(line, file=self._stream, flush=True)
    else:
      self._bar.start()
      (task,) = self._bar.task_ids
      self._bar.update(task, completed=self.count, behind=behind, refresh=True)

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *exc_info) -> None:
    if self._bar is not None:
      self._bar.stop()


def _bar(stream: TextIO) -> progress.Progress:
  """A bar with one task, which is drawn when it is updated and vanishes at the end."""
  return progress.Progress(
    progress.TextColumn('{task.description}: {task.percentage:3.0f}%', markup=False),
    progress.BarColumn(bar_width=20),
    progress.TextColumn('{task.completed:,} of {task.total:,} {task.fields[behind]}', markup=False),
    console=Console(file=stream),
    auto_refresh=False,  # needs no thread
    transient=True,
    redirect_stdout=False,  # what a command prints may go to a file
    redirect_stderr=False,
  )
