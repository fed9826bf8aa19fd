"""How far a long loop has come: a bar on a terminal, now and then a line in a log."""

import sys
import time
from typing import TextIO

import tqdm


class Progress:
  """Counts towards a total on stderr; a context manager.

      with Progress('train', total=50_000) as progress:
        progress.update(256)

  Attributes:
    count: so far.
  """

  def __init__(
    self,
    title: str,
    total: int,
    done: int = 0,
    unit: str = 'images',
    seconds: float = 10.0,
    shown: bool = True,
    stream: TextIO | None = None,
  ):
    """
    Args:
      title: what is counted.
      total: the count at the end.
      done: the count to start with, which is no part of the rate.
      unit: of the count.
      seconds: time between lines, at least, where `stream` is no terminal.
      shown: False only counts.
      stream: stderr by default.
    """
    self._stream = sys.stderr if stream is None else stream
    self._title, self._total, self._unit, self._seconds = title, total, unit, seconds
    self._start_count = self.count = done
    self._shown = shown
    self._start = self._told = time.monotonic()
    self._bar = None
    if shown and self._stream.isatty():
      self._bar = tqdm.tqdm(
        desc=title,
        total=total,
        initial=done,
        unit=f' {unit}',
        file=self._stream,
        dynamic_ncols=True,
        leave=False,
      )

  def update(self, number: int) -> None:
    """Adds to the count."""
    self.count += number
    if self._bar is not None:
      self._bar.update(number)
      return
    now = time.monotonic()
    if self._shown and now >= self._told + self._seconds:
      self._told = now
      rate = (self.count - self._start_count) / (now - self._start)
      print(
        f'{self._title}: {self.count:,} of {self._total:,} {self._unit}, {rate:,.0f}/s',
        file=self._stream,
        flush=True,
      )

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *exc_info) -> None:
    if self._bar is not None:
      self._bar.close()
