"""Results as aligned text for a terminal."""

import itertools
from collections.abc import Sequence

from het_plugin.reporting.columns import Column, Row, columns, problem_line
from het_plugin.reporting.page import Table

_BEST = '*'


def text_table(rows: Sequence[Row], references: Sequence[Row] = (), row_title: str = 'head') -> str:
  """Aligned tables of `rows` (see `columns`): the main one, then one for each further group.

  Args:
    rows: results; the best value of a column is marked with a star.
    references: yardsticks such as chance and ceiling, set apart below the results.
    row_title: what a row is.

  Returns:
    The text, without a newline at its end.
  """
  names = [str(row['head']) for row in (*rows, *references)]
  blocks = [problem_line(rows)] if problem_line(rows) else []
  all_columns = columns([*rows, *references], num_references=len(references))
  for group, members in itertools.groupby(all_columns, key=lambda column: column.group):
    blocks.append(_block(group or row_title, names, list(members), len(rows)))
  return '\n\n'.join(blocks)


def aligned(rows: Sequence[Sequence[str]]) -> str:
  """Lines of right-aligned columns."""
  cells = [_pad(column, '>') for column in zip(*rows, strict=True)]
  return '\n'.join('  '.join(line) for line in zip(*cells, strict=True))


def plain_table(table: Table) -> str:
  """A table under its caption; the first column is aligned to the left, the others to the right."""
  first, *others = zip(*filter(any, [table.header, *table.lines]), strict=True)
  cells = zip(_pad(first, '<'), *(_pad(column, '>') for column in others), strict=True)
  lines = ['  '.join(line).rstrip() for line in cells]
  rule = '-' * max(map(len, [table.caption, *lines]))
  return '\n'.join([table.caption, rule, *lines])


def _block(title: str, names: Sequence[str], members: Sequence[Column], num_rows: int) -> str:
  shown = [i for i in range(len(names)) if i < num_rows or any(c.is_present(i) for c in members)]
  first = _pad([title, *(names[i] for i in shown)], '<')
  body = [
    _pad([c.title + ' ', *(c.cells[i] + (_BEST if i in c.best else ' ') for i in shown)], '>')
    for c in members
  ]
  lines = ['  '.join(cells).rstrip() for cells in zip(first, *body, strict=True)]
  rule = '-' * max(map(len, lines))
  lines.insert(1, rule)
  if len(shown) > num_rows:
    lines.insert(num_rows + 2, rule)
  return '\n'.join(lines)


def _pad(cells: Sequence[str], align: str) -> list[str]:
  width = max(map(len, cells))
  return [f'{cell:{align}{width}}' for cell in cells]
