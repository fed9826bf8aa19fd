"""Results as one self-contained HTML page: tables, plots, and what made them."""

import base64
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources

from het_plugin.reporting.columns import Column, Row, columns, problem_line
from het_plugin.reporting.provenance import Provenance


@dataclasses.dataclass(frozen=True)
class Figure:
  """A PNG, the caption below it, and `alt`, the words for those who do not see it."""

  png: bytes
  caption: str
  alt: str


def html_page(
  *,
  title: str,
  introduction: str,
  rows: Sequence[Row],
  provenance: Provenance,
  references: Sequence[Row] = (),
  notes: Sequence[str] = (),
  figures: Sequence[Figure] = (),
  row_title: str = 'head',
) -> str:
  """One HTML document that needs no other file and no script. All text is escaped.

  Args:
    title: of the page.
    introduction: one paragraph: what was done.
    rows: results (see `columns`).
    provenance: the command, date, versions and configurations.
    references: yardsticks such as chance and ceiling, set apart below the results.
    notes: how to read the columns, a line each.
    figures: plots.
    row_title: what a row is.
  """
  parts = [
    f'<h1>{escape(title)}</h1>',
    f'<p class="lead">{escape(introduction)}</p>',
    *_tables(rows, references, row_title),
    _list(notes),
    *map(_figure, figures),
    _provenance(provenance),
  ]
  style = resources.files(__package__).joinpath('page.css').read_text()
  return _DOCUMENT.format(title=escape(title), style=style, body='\n'.join(filter(None, parts)))


_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _tables(rows: Sequence[Row], references: Sequence[Row], row_title: str) -> list[str]:
  names = [str(row['head']) for row in (*rows, *references)]
  all_columns = columns([*rows, *references], num_references=len(references))
  return [
    _table(group or problem_line(rows), row_title, names, list(members), len(rows))
    for group, members in itertools.groupby(all_columns, key=lambda column: column.group)
  ]


def _table(
  caption: str, row_title: str, names: Sequence[str], members: Sequence[Column], num_rows: int
) -> str:
  header = ''.join(f'<th scope="col">{escape(c.title)}</th>' for c in members)
  lines = [_table_row(i, name, members) for i, name in enumerate(names)]
  references = [
    lines[i] for i in range(num_rows, len(names)) if any(c.is_present(i) for c in members)
  ]
  return '\n'.join(
    [
      '<div class="table">',
      '<table>',
      f'<caption>{escape(caption)}</caption>',
      f'<thead><tr><th scope="col">{escape(row_title)}</th>{header}</tr></thead>',
      f'<tbody>{"".join(lines[:num_rows])}</tbody>',
      f'<tbody class="references">{"".join(references)}</tbody>' if references else '',
      '</table>',
      '</div>',
    ]
  )


def _table_row(i: int, name: str, members: Sequence[Column]) -> str:
  cells = (
    f'<td class="best">{escape(c.cells[i])}</td>'
    if i in c.best
    else f'<td>{escape(c.cells[i])}</td>'
    for c in members
  )
  return f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>'


def _figure(figure: Figure) -> str:
  data = base64.b64encode(figure.png).decode('ascii')
  return (
    f'<figure><img src="data:image/png;base64,{data}" alt="{escape(figure.alt)}">'
    f'<figcaption>{escape(figure.caption)}</figcaption></figure>'
  )


def _list(lines: Sequence[str]) -> str:
  items = ''.join(f'<li>{escape(line)}</li>' for line in lines)
  return f'<ul class="notes">{items}</ul>' if items else ''


def _provenance(provenance: Provenance) -> str:
  return '\n'.join(
    [
      '<section>',
      '<h2>How it was made</h2>',
      f'<pre>{escape(provenance.command)}</pre>',
      f'<p>{escape(provenance.created)} · {escape(_versions(provenance.versions))}</p>',
      *(
        f'<details><summary>Configuration: {escape(name)}</summary>'
        f'<pre>{escape(text)}</pre></details>'
        for name, text in provenance.configs.items()
      ),
      '</section>',
    ]
  )


def _versions(versions: Mapping[str, str]) -> str:
  return ', '.join(f'{name} {version}' for name, version in versions.items())
