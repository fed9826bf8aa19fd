"""Results as aligned text for a terminal."""

import io
import re
from collections.abc import Sequence

from rich import box, console, table
from rich.text import Text

from het_plugin.reporting.columns import Row, Table, tables_of
from het_plugin.system.terminal import printable

_BEST = '*'
_NO_STAR = '\ue000'  # a space until rich, which drops spaces at the end, has aligned the cells
# Lines below the header and between sections only.
_RULES = box.Box('    \n    \n -- \n    \n -- \n -- \n    \n    \n', ascii=True)


def text_table(rows: Sequence[Row], references: Sequence[Row] = (), row_title: str = 'name') -> str:
  """Aligned tables of `rows` (see `columns`): the main one, then one for each further group.

  Args:
    rows: results; the best value of a column is marked with a star.
    references: rows to compare with, such as chance and ceiling, set apart below the results.
    row_title: title of the column of row names.

  Returns:
    The text, without a newline at its end.
  """
  blocks = []
  for number, found in enumerate(tables_of(rows, references, row_title)):
    header = found.header
    if number:
      header = [found.caption, *header[1:]]
    elif found.caption:
      blocks.append(printable(found.caption))
    lines = [_marked(cells, found, i) for i, cells in enumerate(found.lines)]
    below = [_marked(cells, found) for cells in found.references]
    blocks.append(_rendered(_marked(header, found), lines, below))
  return '\n\n'.join(blocks)


def _marked(cells: Sequence[str], found: Table, line: int | None = None) -> list[str]:
  """Cells of a line of a table, each but the first with a star or with room for one."""
  stars = (_BEST if (line, column) in found.best else _NO_STAR for column in range(1, len(cells)))
  return [cells[0], *map(''.join, zip(cells[1:], stars, strict=True))]


def plain_table(found: Table) -> str:
  """A table under its caption; the first column is aligned to the left, the others to the right."""
  lines = [*([found.header] if any(found.header) else []), *found.lines]
  text = _rendered(None, lines)
  caption = printable(found.caption)
  rule = '-' * max(map(len, [caption, *text.splitlines()]))
  return '\n'.join([caption, rule, text])


def aligned(rows: Sequence[Sequence[str]]) -> str:
  """Lines with right-aligned columns."""
  return _rendered(None, rows, left=False)


def _rendered(
  header: Sequence[str] | None,
  *sections: Sequence[Sequence[str]],
  left: bool = True,
) -> str:
  """Lines with a left-aligned first column, and rules between the sections."""
  grid = table.Table(box=_RULES, show_edge=False, show_header=header is not None, pad_edge=False)
  width = len(next(line for section in sections for line in section))
  for i in range(width):
    title = _cell(header[i]) if header else ''
    grid.add_column(title, justify='left' if left and i == 0 else 'right', no_wrap=True)
  for section in sections:
    for line in section:
      grid.add_row(*map(_cell, line))
    grid.add_section()
  out = io.StringIO()
  console.Console(file=out, width=10_000, color_system=None, legacy_windows=False).print(grid)
  lines = out.getvalue().replace(_NO_STAR, ' ').splitlines()
  return '\n'.join(line.rstrip() for line in lines)


def _cell(text: str) -> Text:
  """The text on one line: names of classes may have line breaks and tabs, which rich obeys."""
  return Text(printable(re.sub(r'\s', ' ', text)))
