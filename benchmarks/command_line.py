"""What the benchmarks share: their flags, the table that they print and the JSON file."""

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from het_plugin import reporting


def make_parser(description: str) -> argparse.ArgumentParser:
  """A parser with --json. The help shows the whole description."""
  parser = argparse.ArgumentParser(
    description=description, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--json', type=Path, help='file for the rows')
  return parser


def add_clock(parser: argparse.ArgumentParser) -> None:
  """--cpu_time; args.clock is the function that tells the seconds."""
  parser.add_argument(
    '--cpu_time',
    dest='clock',
    action='store_const',
    const=time.process_time,
    default=time.perf_counter,
    help='seconds of CPU time, for ratios on a machine that other work shares',
  )


def names(choices):
  """An argparse type: comma-separated names out of `choices`."""

  def parse(text):
    if unknown := [name for name in text.split(',') if name not in choices]:
      raise argparse.ArgumentTypeError(f'{unknown} unknown: choose from {", ".join(choices)}')
    return text.split(',')

  return parse


def sizes(form: str, multiple: int = 1):
  """An argparse type: comma-separated tuples of whole numbers, '5000x64,100x8' for the form 'KxD'.

  The first number of each is a multiple of `multiple`.
  """

  def parse(text):
    found = [tuple(map(int, size.split('x'))) for size in text.split(',')]
    if wrong := [x for x in found if len(x) != len(form.split('x')) or x[0] % multiple]:
      condition = f', with {form[0]} a multiple of {multiple}' if multiple > 1 else ''
      raise argparse.ArgumentTypeError(f'{wrong[0]} must be {form}{condition}')
    return found

  return parse


def integers(text):
  return [int(x) for x in text.split(',')]


def numbers(text):
  return [float(x) for x in text.split(',')]


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
  """Prints aligned columns, numbers with four significant digits."""
  cells = [[f'{x:.4g}' if isinstance(x, float) else str(x) for x in row] for row in rows]
  print(reporting.aligned([header, *cells]))


def write_json(path: Path | None, result: dict | list) -> None:
  """Writes the result to the path of --json, NaN as null."""
  if path is not None:
    reporting.write_json(result, path)


def read_json(path: Path | None) -> list[dict]:
  """The rows that the file of --json has already."""
  return json.loads(path.read_text()) if path and path.exists() else []


def collect(path: Path | None, total: int, rows: Iterable[dict]) -> list[dict]:
  """As `report`, of rows that take long: with progress, and --json has those measured so far."""
  found = []
  with reporting.Progress('measured', total, unit='rows') as progress:
    for row in rows:
      found.append(row)
      write_json(path, found)
      progress.update()
  _print_rows(found)
  return found


def report(path: Path | None, rows: Sequence[Mapping[str, object]]) -> None:
  """Prints rows with the same columns as a table and writes them to the path of --json."""
  _print_rows(rows)
  write_json(path, rows)


def _print_rows(rows: Sequence[Mapping[str, object]]) -> None:
  print_table(list(rows[0]), [list(row.values()) for row in rows])
