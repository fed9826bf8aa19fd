"""Parses numbers in the text of flags."""

import math
from collections.abc import Collection, Sequence


def integers(
  flag: str, values: Sequence[str], least: int = 0, lengths: Collection[int] = ()
) -> list[int]:
  """The whole numbers of a list flag.

  Args:
    flag: name of the flag, for the message.
    values: parts of its value.
    least: the smallest allowed number, at least 0.
    lengths: allowed lengths of the list; by default any except 0.

  Raises:
    ValueError: a number or the length is wrong; the message names the flag.
  """
  right = all(value.isdecimal() and int(value) >= least for value in values)
  if not right or not values or (lengths and len(values) not in lengths):
    count = f'{" or ".join(map(str, lengths))} ' if lengths else ''
    raise ValueError(
      f'--{flag}={",".join(values)} must be {count}whole numbers of at least {least}'
    )
  return [int(value) for value in values]


def positive_or_word(flag: str, value: str, words: Collection[str]) -> float | str:
  """One of the words as it is, else a number.

  Raises:
    ValueError: it is neither a word nor a finite number > 0; the message names the flag.
  """
  if value in words:
    return value
  try:
    number = float(value)
  except ValueError:
    number = math.nan
  if not 0 < number < math.inf:
    others = f', or {", ".join(words)}' if words else ''
    raise ValueError(f'--{flag}={value} must be a number > 0{others}')
  return number
