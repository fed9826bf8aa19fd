"""Progress of a long loop: a bar on a terminal, elsewhere a line every ten seconds."""

import datetime
import sys
import time
from typing import TextIO

import jax
import tqdm


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
  ):
    """Starts at `done`, which the rate leaves out; two lines are at least `seconds` apart."""
    self._stream = sys.stderr if stream is None else stream
    self._title, self._total, self._unit, self._seconds = title, total, unit, seconds
    self._start_count = self.count = done
    self._shown = jax.process_index() == 0
    self._start = self._told = time.monotonic()
    self._bar = None
    if self._shown and self._stream.isatty():
      self._bar = tqdm.tqdm(
        desc=title,
        total=total,
        initial=done,
        unit=f' {unit}',
        file=self._stream,
        dynamic_ncols=True,
        leave=False,
      )

  def update(self, number: int, note: str = '') -> None:
    """Adds to the count; `note` is shown behind it, such as a loss."""
    self.count += number
    if self._bar is not None:
      self._bar.set_postfix_str(note, refresh=False)
      self._bar.update(number)
      return
    now = time.monotonic()
    if self._shown and now >= self._told + self._seconds:
      self._told = now
      rate = (self.count - self._start_count) / (now - self._start)
      left = datetime.timedelta(seconds=round(max(0, self._total - self.count) / max(rate, 1e-9)))
      line = f'{self._title}: {self.count:,} of {self._total:,} {self._unit}, {rate:,.0f}/s'
      print(', '.join(filter(None, [line, note, f'ETA {left}'])), file=self._stream, flush=True)

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *exc_info) -> None:
    if self._bar is not None:
      self._bar.close()
