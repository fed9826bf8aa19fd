"""Parses the text of flags: numbers, and values to sweep over."""

import ast
import io
import math
import re
import tokenize
from collections.abc import Collection, Sequence

HEADS = ('det', 'het', 'het_h', 'het_xl')  # by the names of their gin files
NO_FLAG = {'no_flag': True}  # metadata of a field of settings that is no flag


def integers(
  flag: str, values: Sequence[str], least: int = 0, lengths: Collection[int] = ()
) -> list[int]:
  """The whole numbers of a list flag, each at least `least`.

  Raises:
    ValueError: a number is wrong, or the length is 0 or none of `lengths`.
  """
  right = all(value.isdecimal() and int(value) >= least for value in values)
  if not right or not values or (lengths and len(values) not in lengths):
    count = f'{" or ".join(map(str, lengths))} ' if lengths else ''
    raise ValueError(
      f'--{flag}={",".join(values)} must be {count}whole numbers of at least {least}'
    )
  return [int(value) for value in values]


def positive_or_word(flag: str, value: str, words: Collection[str]) -> float | str:
  """One of the words as it is, else a finite number > 0, else a ValueError."""
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


def split_values(text: str) -> list[str]:
  """Splits at the commas outside quotes and brackets: 'a(1, 2),"x,y"' is 'a(1, 2)' and '"x,y"'.

  Values stay source text, as gin reads it: True remains True and strings keep their quotes.
  """
  values = []
  depth = 0
  start = 0
  try:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
      depth += (token.string in ('(', '[', '{')) - (token.string in (')', ']', '}'))
      if token.type == tokenize.ERRORTOKEN and token.string in '"\'':
        raise tokenize.TokenError('quotes')
      if token.string == ',' and depth == 0:
        values.append(text[start : token.start[1]].strip())
        start = token.end[1]
  except (tokenize.TokenError, SyntaxError) as error:
    raise ValueError(f'{text!r} has quotes or brackets that do not match') from error
  return [*values, text[start:].strip()]


def parse_sweep(text: str) -> tuple[str, list[str]]:
  """('NAME', ['v1', 'v2']) of 'NAME=v1,v2'; another form or a repeated value is a ValueError."""
  name, equals, values = text.partition('=')
  name = name.strip()
  if not equals or not re.fullmatch(r'[\w./]+', name):
    raise ValueError(f'--sweep={text} must be NAME=VALUE,VALUE,..., NAME as in --gin.NAME')
  values = split_values(values)
  if not all(values):
    raise ValueError(f'--sweep={text} has an empty value')
  for value in values:
    if not re.search('[@%]', value):  # references, which only gin resolves
      try:
        ast.literal_eval(value)
      except (ValueError, SyntaxError) as error:
        raise ValueError(
          f'--sweep={text}: {value} is not a Python value; strings need quotes of their own'
        ) from error
  if repeated := [value for value in values if values.count(value) > 1]:
    raise ValueError(f'--sweep={text} has {repeated[0]} twice')
  return name, values
