"""Values that several flags share, and values to sweep over."""

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Sequence
from typing import Literal, get_args

# Heads by the names of their gin files.
NoisyHead = Literal['het', 'het_h', 'het_xl']
Head = Literal['det', 'het', 'het_h', 'het_xl']
HEADS: tuple[Head, ...] = get_args(Head)
NO_FLAG = {'no_flag': True}  # metadata of a field of settings that is no flag


@dataclasses.dataclass(frozen=True)
class OneOf:
  """Says at the type of text which words it may be: Annotated[str, OneOf(WORDS)]."""

  words: Sequence[str]


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
