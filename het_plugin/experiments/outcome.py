"""What a study is asked, and what comes out of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from het_plugin import reporting


@dataclasses.dataclass(frozen=True)
class Request:
  """What the command line asks of a study.

  Attributes:
    output_dir: takes the runs.
    gin_bindings: for every cell, after its own.
    gin_search_paths: where gin files are looked for.
    seeds: in place of the study's; None for those.
    cells: labels of the only ones; None for all.
  """

  output_dir: Path
  gin_bindings: Sequence[str] = ()
  gin_search_paths: Sequence[str] = ('.',)
  seeds: Sequence[int] | None = None
  cells: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A table, and what explains it.

  Attributes:
    title, introduction: of the page.
    rows: as `reporting.columns` takes them.
    tables: further ones.
    notes: how to read the columns.
    figures: plots.
    configs: {cell: its gin configuration}.
    details: what else results.json says.
  """

  title: str
  introduction: str
  rows: Sequence[Mapping[str, Any]]
  tables: Sequence[reporting.Table] = ()
  notes: Sequence[str] = ()
  figures: Sequence[reporting.Figure] = ()
  configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
  details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def write(outcome: Outcome, output_dir: Path, copy: str | None) -> str:
  """Writes results.json, results.txt and index.html; returns the text."""
  results = {'title': outcome.title, **outcome.details, 'rows': outcome.rows}
  for path in [output_dir / 'results.json', *([copy] if copy else [])]:
    reporting.write_json(results, path)
  text = '\n\n'.join(
    [
      reporting.text_table(outcome.rows, row_title='cell'),
      *map(reporting.plain_table, outcome.tables),
    ]
  )
  (output_dir / 'results.txt').write_text(text + '\n')
  page = reporting.html_page(
    title=outcome.title,
    introduction=outcome.introduction,
    rows=outcome.rows,
    tables=outcome.tables,
    notes=outcome.notes,
    figures=outcome.figures,
    provenance=reporting.Provenance.of_this_process('het_plugin.ablate', outcome.configs),
    row_title='cell',
  )
  (output_dir / 'index.html').write_text(page)
  return text
