"""Text of others, for a terminal and for a spreadsheet."""

import re

# Control characters except the line break, marks that reorder a line, and lone surrogates.
_CONTROL = re.compile(
  '[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]'
)

_COMPUTED = re.compile(r"['=+\-@\t\r\n＝＋－＠]")  # how a text begins that needs a ' in a CSV file


def printable(text: str) -> str:
  r"""Text whose control characters are written out, such as \x1b, so that no terminal obeys them.

  Names of classes, messages and paths of a run may be of another person.
  """
  return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def not_computed(text: str) -> str:
  """Text of a CSV file that no spreadsheet computes: one that begins with =, +, - or @ gets a '.

  So does one that begins with ', so that `as_typed` is the way back (OWASP, "CSV Injection").
  """
  return f"'{text}" if _COMPUTED.match(text) else text


def as_typed(text: str) -> str:
  """Text of a CSV file without the ' of `not_computed`."""
  return text[1:] if text[:1] == "'" and _COMPUTED.match(text[1:]) else text
