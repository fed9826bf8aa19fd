"""Text of others, for a terminal."""

import re

# Control characters except the line break, marks that reorder a line, and lone surrogates.
_CONTROL = re.compile(
  '[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]'
)


def printable(text: str) -> str:
  r"""Text whose control characters are written out, such as \x1b, so that no terminal obeys them.

  Names of classes, messages and paths of a run may be of another person.
  """
  return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
