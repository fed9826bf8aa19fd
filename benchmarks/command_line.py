"""What all benchmarks share: lists on the command line, the table and the JSON file."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from het_plugin.reporting import aligned


def names(choices):
  """An argparse type: comma-separated names out of `choices`."""

  def parse(text):
    if unknown := [name for name in text.split(',') if name not in choices]:
      raise argparse.ArgumentTypeError(f'{unknown} unknown: choose from {", ".join(choices)}')
    return text.split(',')

  return parse


def integers(text):
  return [int(x) for x in text.split(',')]


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
  """Aligned columns, numbers with four significant digits."""
  cells = [[f'{x:.4g}' if isinstance(x, float) else str(x) for x in row] for row in rows]
  print(aligned([header, *cells]))


def write_json(path: Path | None, result: dict | list) -> None:
  if path is not None:
    path.write_text(json.dumps(result, indent=1) + '\n')
