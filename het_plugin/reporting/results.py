"""Results as JSON and CSV files, with their provenance: command, time and versions."""

import contextlib
import csv
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from het_plugin.system import run_files
from het_plugin.system.terminal import not_computed

_GROUP_ROWS = 2**16  # of a Parquet file
_LOOKED_AT = 2**16  # bytes at both ends of a file
# One of these is near the top of the results of every command, indented as `write_json` does.
_OUR_JSON = re.compile(
  rb'\A[{[][\s\S]*\n {2,4}"'
  rb'(nll|head|image|protocol|metric|rows|files|topology|state|scalars|gain)":'
)
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'seqio', 'tensorflow', 'numpy')


def provenance(program: str) -> dict[str, Any]:
  """What a reader needs to reproduce a result of `python -m PROGRAM` in this process.

  Returns:
    'command', the command line; 'created', date and time with the time zone; 'versions', {package:
    version}.
  """
  versions = {'python': platform.python_version()}
  for name in _PACKAGES:
    # One may not be here, or be another distribution, such as tensorflow-cpu.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return {
    'command': shlex.join(['python', '-m', program, *sys.argv[1:]]),
    'created': datetime.datetime.now().astimezone().isoformat(sep=' ', timespec='minutes'),
    'versions': versions,
  }


def write_json(rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], path: str | Path) -> None:
  """Writes `rows` as JSON, NaN and infinities as null; makes the directory.

  Entries of a sequence that is no list are taken one after the other: they need not be in memory.
  """
  with run_files.replacing(path) as unfinished, unfinished.open('w') as stream:
    stream.writelines(_json(rows))
    stream.write('\n')


def written_here(flag: str, path: str | Path) -> bool:
  """Whether the file that is at `path` is what a command writes for this flag, or is empty.

  Args:
    flag: 'csv', 'html', 'json' or 'png', or another for a file of rows or of parameters.
    path: of a file.
  """
  with open(path, 'rb') as file:
    begin = file.read(_LOOKED_AT)
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _LOOKED_AT))
    end = file.read()
  if str(path).endswith('.parquet'):
    found = b'het_plugin' in end
  elif flag == 'csv' or str(path).endswith('.csv'):  # of `audit`, `predict` and `audit --suggest`
    found = bool({b'suggested', b'entropy', b'was'} & set(begin.partition(b'\n')[0].split(b',')))
  elif flag == 'html':
    found = b'<meta name="generator" content="het_plugin">' in begin
  elif flag == 'json':
    found = _OUR_JSON.search(begin) is not None
  elif flag == 'png':
    found = b'Matplotlib' in begin
  elif str(path).endswith('.npy'):
    found = end.endswith(b'het_plugin\n')
  else:  # rows or parameters: in the metadata, or the names of arrays
    found = b'het_plugin' in begin or b'checksums' in end or b'head/' in end
  return found or not begin


def write_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], path: str | Path) -> None:
  """Writes a line per row, below the names of the columns; makes the directory.

  A text that a spreadsheet would compute gets a ' before it (`terminal.not_computed`).
  """
  with (
    run_files.replacing(path) as unfinished,
    open(unfinished, 'w', newline='', encoding='utf-8') as stream,
  ):
    writer = csv.DictWriter(stream, columns, lineterminator='\n')
    writer.writeheader()
    for row in rows:
      writer.writerow(
        {name: not_computed(x) if isinstance(x, str) else x for name, x in row.items()}
      )


def write_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], path: str) -> None:
  """Writes the rows as Parquet where the path ends in .parquet, else as CSV.

  Parquet keeps types, and texts as they are.
  """
  if not str(path).endswith('.parquet'):
    return write_csv(columns, rows, path)
  import pyarrow as pa  # slow, and few tables need it
  from pyarrow import parquet

  with run_files.replacing(path) as unfinished:
    writer = None
    rows = iter(rows)
    while some := list(itertools.islice(rows, _GROUP_ROWS)):
      table = pa.Table.from_pylist(some).replace_schema_metadata({'made by': 'het_plugin'})
      writer = writer or parquet.ParquetWriter(unfinished, table.schema)
      writer.write_table(table)
    if writer:
      writer.close()
  return None


def _json(value: Any, indent: str = '\n') -> Iterator[str]:
  """Pieces of the text of a value, whose lines begin with `indent`."""
  inner = f'{indent}  '
  if isinstance(value, Mapping):
    named = ((json.dumps(str(name)), x) for name, x in value.items())
    brackets = '{}'
    entries = (itertools.chain([name, ': '], _json(x, inner)) for name, x in named)
  elif isinstance(value, Sequence) and not isinstance(value, list | tuple | str | bytes):
    brackets = '[]'
    entries = ([_text(x, inner)] for x in value)
  else:
    yield _text(value, indent)
    return
  before = brackets[0]
  for pieces in entries:
    yield f'{before}{inner}'
    yield from pieces
    before = ','
  yield f'{indent}{brackets[1]}' if before == ',' else brackets


def _text(value: Any, indent: str) -> str:
  return json.dumps(_plain(value), indent=2, allow_nan=False).replace('\n', indent)


def _plain(value: Any) -> Any:
  if value is None or isinstance(value, str | int):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, Mapping):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, np.generic | np.ndarray):
    return _plain(value.tolist())
  return value
