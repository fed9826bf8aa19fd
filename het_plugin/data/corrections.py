"""Corrected labels of the examples of shards, from a table such as `audit` writes."""

import pathlib
import re
import zlib
from collections.abc import Sequence

import numpy as np

from het_plugin.data import shards
from het_plugin.data.image_folder import table_records

_EXAMPLE = re.compile(r'(.*)\[([0-9]{1,18})\]')


def relabel(
  table: str,
  labels: np.ndarray,
  paths: Sequence[shards.File],
  starts: np.ndarray,
  names: Sequence[str] | None,
  num_classes: int,
) -> tuple[np.ndarray, str]:
  """Replaces labels int32 [N, L], or with fields [N], in place by those of a CSV file.

  Its columns are `file`, such as train-0.tar[7] for the eighth example of that file, and `label`, a
  name of a class, or its number if classes have no names. An example has this label alone then.

  Args:
    paths, starts: the files, and their first rows and N, int64 [number of files + 1].
    names: of the classes; None if they have numbers only.

  Returns:
    The rows that the table names, int64 [M], and a checksum.

  Raises:
    ValueError: there is no such table, or a line names no example or no class, or an example twice.
  """
  if not pathlib.Path(table).is_file():
    raise ValueError(f'labels={table}: there is no such file.')
  file_of = {path.relative: i for i, path in enumerate(paths)}
  number_of = {text: k for k, text in enumerate(names or map(str, range(num_classes)))}
  classes: dict[int, int] = {}  # by row
  for line, record in table_records(pathlib.Path(table), ('file', 'label'), ()):
    match = _EXAMPLE.fullmatch(record['file'] or '')
    i = file_of.get(match[1]) if match else None
    row = None if i is None else int(starts[i]) + int(match[2])
    if row is None or row >= starts[i + 1]:
      raise ValueError(f'{table}, line {line}: there is no example {record["file"]!r}.')
    if row in classes:
      raise ValueError(f'{table}, line {line}: {record["file"]} is there for the second time.')
    if record['label'] not in number_of:
      raise ValueError(f'{table}, line {line}: {record["label"]!r} is no class.')
    classes[row] = number_of[record['label']]
  rows = np.fromiter(classes, np.int64, len(classes))
  label = np.fromiter(classes.values(), np.int32, len(classes))
  fields = {x: labels[x] for x in labels.dtype.names or ()} or {'label': labels}
  alone = {'label': (label, -1), 'label_weight': (1, 0), 'annotator': (-1, -1)}
  for field in fields.keys() & alone.keys():
    first, rest = alone[field]
    fields[field][rows] = rest
    fields[field][rows, 0] = first
  return rows, f'{zlib.crc32(rows.tobytes() + label.tobytes()):08x}'
