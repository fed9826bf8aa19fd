"""A comparison of runs as text, JSON, plots and a page, for all mains of evaluation."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from het_plugin import reporting

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
  """What is written."""

  title: str  # of the page
  introduction: str
  json: Any  # all numbers
  rows: Sequence[Row] = ()  # one per run (see `reporting`)
  row_title: str = 'run'  # what a row is
  tables: Sequence[reporting.Table] = ()  # further ones
  notes: Sequence[str] = ()  # lines below the tables
  # makes the plots, {file name: figure}; called only if they are wanted
  draw: Callable[[], Mapping[str, reporting.Figure]] = dict
  # {name: gin text}, shown folded
  configs: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def text(self) -> str:
    """Tables and notes for a terminal."""
    blocks = [reporting.text_table(self.rows, row_title=self.row_title)] if self.rows else []
    blocks += map(reporting.plain_table, self.tables)
    return '\n\n'.join([*blocks, *(['\n'.join(self.notes)] if self.notes else [])])

  def write(
    self,
    program: str,
    *,
    json: str | None = None,
    png: str | None = None,
    html: str | None = None,
    output_dir: str | None = None,
  ) -> None:
    """Prints the text and writes the files whose paths are given; only process 0 does.

    Args:
      program: the main, as in `python -m PROGRAM`.
      json: path of the numbers.
      png: path of the first plot.
      html: path of the page.
      output_dir: folder of results.json, results.txt, index.html and all plots.
    """
    if jax.process_index() > 0:
      return
    print(self.text())
    folder = Path(output_dir) if output_dir else None
    for path in filter(None, (json, folder and folder / 'results.json')):
      reporting.write_json(self.json, path)
    if not (png or html or folder):
      return
    figures = self.draw()
    page = reporting.html_page(
      title=self.title,
      introduction=self.introduction,
      rows=self.rows,
      row_title=self.row_title,
      tables=self.tables,
      notes=self.notes,
      figures=list(figures.values()),
      provenance=reporting.Provenance.of_this_process(program, self.configs),
    ).encode()
    files = {html: page, png: next(iter(figures.values())).png if png else b''}
    if folder:
      files |= {folder / 'index.html': page, folder / 'results.txt': f'{self.text()}\n'.encode()}
      files |= {folder / f'{name}.png': figure.png for name, figure in figures.items()}
    for path in filter(None, files):
      Path(path).parent.mkdir(parents=True, exist_ok=True)
      Path(path).write_bytes(files[path])
