"""Results as one self-contained HTML page: tables, plots, and what made them."""

import base64
import dataclasses
from collections.abc import Sequence
from importlib import resources

from het_plugin.reporting.columns import Row, TableOfRows, tables_of
from het_plugin.reporting.results import Provenance


@dataclasses.dataclass(frozen=True)
class Figure:
  """A plot of a page."""

  png: bytes | Sequence[bytes]  # several are shown side by side, or stacked on a narrow page
  caption: str
  alt: str  # alternative text
  recolour: bool = True  # whether a dark page turns dark lines into light ones; not of pictures

  @property
  def pngs(self) -> Sequence[bytes]:
    return [self.png] if isinstance(self.png, bytes) else self.png


@dataclasses.dataclass(frozen=True)
class Table:
  """Lines of text under a header."""

  caption: str
  header: Sequence[str]
  lines: Sequence[Sequence[str]]


def html_page(
  *,
  title: str,
  introduction: str,
  rows: Sequence[Row],
  provenance: Provenance,
  references: Sequence[Row] = (),
  tables: Sequence[Table] = (),
  notes: Sequence[str] = (),
  figures: Sequence[Figure] = (),
  row_title: str = 'head',
) -> str:
  """One HTML document that needs no other file and no script. All text is escaped.

  The introduction is a paragraph, notes are lines; rows and references are as in `text_table`.
  """
  plain = [
    TableOfRows(table.caption, table.header, [(line, ()) for line in table.lines], [])
    for table in tables
  ]
  found = tables_of(rows, references, row_title)
  import jinja2  # tables do without

  environment = jinja2.Environment(
    autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
  )
  environment.filters['base64'] = _base64
  return environment.from_string(_file('page.html')).render(
    title=title,
    style=_file('page.css'),
    introduction=introduction,
    tables=[*found, *plain],
    marked=any(best for table in found for _, best in table.rows),
    notes=notes,
    figures=figures,
    provenance=provenance,
  )


def _base64(data: bytes) -> str:
  return base64.b64encode(data).decode('ascii')


def _file(name: str) -> str:
  return resources.files(__package__).joinpath(name).read_text()
