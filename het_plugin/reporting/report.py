"""A comparison as text, JSON, plots and one self-contained HTML page."""

import base64
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from het_plugin.reporting.columns import Row, Table, tables_of
from het_plugin.reporting.results import provenance, write_json
from het_plugin.reporting.text import plain_table, text_table
from het_plugin.system import run_files
from het_plugin.system.terminal import printable


@dataclasses.dataclass(frozen=True)
class Picture:
  """The PNG of a plot that has photographs in it, for a light and for a dark page."""

  light: bytes
  dark: bytes


@dataclasses.dataclass(frozen=True)
class Figure:
  """A plot of a page."""

  # several are shown side by side, or stacked on a narrow page
  png: bytes | Picture | Sequence[bytes]
  caption: str
  alt: str = ''  # alternative text; without one, the caption
  recolour: bool = True  # whether a dark page turns dark lines into light ones; not of pictures

  @property
  def pngs(self) -> Sequence[bytes]:
    if isinstance(self.png, Picture):
      return [self.png.light]
    return [self.png] if isinstance(self.png, bytes) else self.png

  @property
  def dark(self) -> bytes | None:
    """The version of a picture for a dark page."""
    return self.png.dark if isinstance(self.png, Picture) else None


@dataclasses.dataclass(frozen=True)
class Thumbnail:
  """A small picture of an example."""

  png: bytes
  text: str  # lines below it
  name: str  # of the example, below the text


@dataclasses.dataclass(frozen=True)
class Gallery:
  """Small pictures of a page, below a caption."""

  caption: str
  thumbnails: Sequence[Thumbnail]

  @property
  def pngs(self) -> Sequence[bytes]:
    return [thumbnail.png for thumbnail in self.thumbnails]


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
  """What a command prints and writes.

  The introduction is above the tables of a page, and the first of the notes in a text.
  """

  title: str  # of the page
  introduction: str
  json: Any  # all numbers
  rows: Sequence[Row] = ()  # one per run (see `columns`)
  references: Sequence[Row] = ()  # rows to compare with, such as chance, set apart below the others
  row_title: str = 'run'  # what a row is
  alarms: Sequence[str] = ()  # lines of a page above everything else
  tables: Sequence[Table] = ()  # further ones
  notes: Sequence[str] = ()  # lines below the tables
  # makes the plots, {file name: figure}; called only if they are wanted
  draw: Callable[[], Mapping[str, Figure | Gallery]] = dict
  # {flag: writes the file that it names}, after the report
  writers: Mapping[str, Callable[[str], None]] = dataclasses.field(default_factory=dict)
  # {name: gin text}, shown folded
  configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
  written: Callable[[], None] = lambda: None  # called when all is written

  def text(self) -> str:
    """Tables and notes for a terminal."""
    blocks = [text_table(self.rows, self.references, self.row_title)] if self.rows else []
    blocks += map(plain_table, self.tables)
    return '\n\n'.join([*blocks, printable('\n'.join([self.introduction, *self.notes]))])

  def page(self, program: str, figures: Iterable[Figure | Gallery] = ()) -> str:
    """One HTML document that needs no other file and no script. All text is escaped."""
    import jinja2  # tables do without

    environment = jinja2.Environment(
      autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters['base64'] = lambda png: base64.b64encode(png).decode('ascii')
    return environment.from_string(_file('page.html')).render(
      report=self,
      style=_file('page.css'),
      tables=[*tables_of(self.rows, self.references, self.row_title), *self.tables],
      figures=figures,
      provenance=provenance(program),
    )

  def write(
    self,
    program: str,
    *,
    json: str | None = None,
    png: str | None = None,
    html: str | None = None,
    output_dir: str | Path | None = None,
    others: Mapping[str, str | None] | None = None,
  ) -> None:
    """Prints the text and writes the files whose paths are given; only process 0 does.

    Args:
      program: the main, as in `python -m PROGRAM`.
      json: path of the numbers.
      png: path of the first plot.
      html: path of the page.
      output_dir: folder of results.json, results.txt, index.html and all plots.
      others: {flag: path} of `writers`.
    """
    import jax  # slow: pages and tables need none

    if jax.process_index() > 0:
      return
    print(self.text())
    folder = Path(output_dir) if output_dir else None
    for path in filter(None, (json, folder and folder / 'results.json')):
      write_json(self.json, path)
    if folder:
      _replace(folder / 'results.txt', f'{self.text()}\n'.encode())
    for flag, path in (others or {}).items():
      if path:
        self.writers[flag](path)
    if png or html or folder:  # the last, because a defect of a plot ends the program
      self._write_plots(program, png, html, folder)
    self.written()

  def _write_plots(
    self, program: str, png: str | None, html: str | None, folder: Path | None
  ) -> None:
    try:
      figures = self.draw()
    except Exception:
      # No number is lost with a plot; what went wrong is shown as any other defect.
      page = self.page(program).encode()
      for path in filter(None, (html, folder and folder / 'index.html')):
        _replace(path, page)
      raise
    page = self.page(program, figures.values()).encode()
    files = {html: page, png: next(iter(figures.values())).pngs[0] if png else b''}
    if folder:
      files[folder / 'index.html'] = page
      for name, figure in figures.items():
        for i, one in enumerate(figure.pngs, 1):
          files[folder / (f'{name}_{i}.png' if len(figure.pngs) > 1 else f'{name}.png')] = one
    for path in filter(None, files):
      _replace(path, files[path])
    if folder:
      print(f'\nThe same with plots: {folder / "index.html"}')


def _replace(path: str | Path, content: bytes) -> None:
  with run_files.replacing(path) as unfinished:
    unfinished.write_bytes(content)


def _file(name: str) -> str:
  return resources.files(__package__).joinpath(name).read_text()
