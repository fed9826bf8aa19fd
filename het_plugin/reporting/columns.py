"""Rows of results as columns of formatted cells, for the text table and the HTML page.

A row is a mapping. These fields are known (all are optional except `name`):

  name              name of the row, such as a head, a checkpoint or a cell
  num_classes, pre_logits_dim, num_factors, mesh    the problem; stated once where all rows agree
  nll               nats per example
  precision_at_1, ece, ...    in [0, 1]
  tau               the temperature
  num_params, extra_params    counts; extra is over the deterministic head
  ms_per_step       milliseconds
  fewshot           {dataset: {shots: accuracy}}
  fewshot_stderr    standard errors, nested like `fewshot`
  stderr            {field: standard error} of the fields above
  tables            {title: {field: value}}, each a table; with a 'stderr' of their own

Any other number or string becomes a column of its own name. None and NaN are shown as a dash.
"""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

_MISSING = '–'
_LOWEST_SHOWN_P = 1e-4


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of text."""

  caption: str
  header: Sequence[str]
  lines: Sequence[Sequence[str]]
  references: Sequence[Sequence[str]] = ()  # lines to compare with, set apart
  best: Collection[tuple[int, int]] = ()  # (line, column) of cells that are marked


@dataclasses.dataclass(frozen=True)
class _Field:
  title: str
  spec: str = ''
  better: Callable | None = None  # min or max


_FIELDS = {
  'num_classes': _Field('classes K', ','),
  'pre_logits_dim': _Field('pre-logits D', ','),
  'num_factors': _Field('factors R', ','),
  'mesh': _Field('mesh'),
  'nll': _Field('NLL', '.3f', min),
  'precision_at_1': _Field('prec@1', '.3f', max),
  'precision_at_5': _Field('prec@5', '.3f', max),
  'ece': _Field('ECE', '.3f', min),
  'adaptive_ece': _Field('adaptive ECE', '.3f', min),
  'brier': _Field('Brier', '.3f', min),
  'ranking_ap': _Field('ranking AP', '.3f', max),
  'aurc': _Field('AURC', '.4f', min),
  'e_aurc': _Field('E-AURC', '.4f', min),
  'auroc_errors': _Field('AUROC errors', '.3f', max),
  'auroc': _Field('AUROC', '.3f', max),
  'fpr_at_95': _Field('FPR@95', '.3f', min),
  'entropy': _Field('entropy', '.3f'),
  'mutual_information': _Field('MI', '.4f'),
  'tau': _Field('tau', '.3f'),
  'validation_nll': _Field('validation NLL', '.3f'),
  'num_params': _Field('parameters', ','),
  'extra_params': _Field('extra', ','),
  'num_samples': _Field('samples S', ','),
  'ms_per_step': _Field('ms/step', '.1f'),
}
_PROBLEM = ('num_classes', 'pre_logits_dim', 'num_factors', 'mesh')


def tables_of(
  rows: Sequence[Row], references: Sequence[Row] = (), row_title: str = 'name'
) -> list[Table]:
  """The main table of rows, then one for each further group; see the module docstring.

  The caption of the main table has the fields that all rows share: 'classes K 2,297, mesh 4x2'. A
  cell of the rows is marked if it has the best value of its column.
  """
  everything = [*rows, *references]
  shared = _shared_fields(rows)
  caption = ', '.join(f'{_FIELDS[name].title} {value}' for name, value in shared.items())
  groups = {caption: [{k: v for k, v in row.items() if k not in shared} for row in everything]}
  further = [_tables(row) for row in everything]
  for title in dict.fromkeys(title for of_row in further for title in of_row):
    groups[title] = [of_row.get(title, {}) for of_row in further]
  found = []
  for caption, members in groups.items():
    header = [row_title]
    lines = [[str(row['name'])] for row in everything]
    best = set()
    for column, name in enumerate(_ordered_fields(members), 1):
      title, cells, leaders = _column(name, members, len(rows))
      header.append(title)
      best |= {(i, column) for i in leaders}
      for line, text in zip(lines, cells, strict=True):
        line.append(text)
    if len(header) > 1:
      below = [line for line in lines[len(rows) :] if set(line[1:]) != {_MISSING}]
      found.append(Table(caption, header, lines[: len(rows)], below, best))
  return found


def fewshot_fields(results: Iterable[Row]) -> dict[str, Any]:
  """The fields `fewshot` and `fewshot_stderr` of a run, from its few-shot results."""
  found: dict[str, Any] = {'fewshot': {}, 'fewshot_stderr': {}}
  for x in results:
    found['fewshot'].setdefault(x['dataset'], {})[x['shots']] = x['mean']
    found['fewshot_stderr'].setdefault(x['dataset'], {})[x['shots']] = x['stderr']
  return found


def _tables(row: Row) -> dict[str, Row]:
  """The further tables of a row, few-shot accuracies among them."""
  found = dict(row.get('tables', {}))
  for dataset, by_shots in row.get('fewshot', {}).items():
    titles = {n: shots_text(n) for n in sorted(by_shots)}
    errors = row.get('fewshot_stderr', {}).get(dataset, {})
    found[f'few-shot accuracy {dataset}'.strip()] = {
      **{title: by_shots[n] for n, title in titles.items()},
      'stderr': {title: errors.get(n) for n, title in titles.items()},
    }
  return found


def _shared_fields(rows: Sequence[Row]) -> dict[str, str]:
  """{field: formatted value} of the problem's fields that are the same in every row."""
  shared = {}
  for name in _PROBLEM:
    values = {cell(row.get(name), spec=_FIELDS[name].spec) for row in rows}
    if len(values) == 1 and _MISSING not in values:
      shared[name] = values.pop()
  return shared


def _column(name: str, rows: Sequence[Row], compared: int) -> tuple[str, list[str], list[int]]:
  """Title and cells of a field, and which of the first `compared` rows have the best value."""
  stderr = [(row.get('stderr') or {}).get(name) for row in rows]
  values = [row.get(name) for row in rows]
  field = _FIELDS.get(name) or _Field(name, _spec(values, stderr))
  if re.fullmatch(r'[\d,]+ shots?|[\d.]+%', name):
    field = _Field(name, '.3f', max)
  printed = [cell(value, spec=field.spec) for value in values[:compared]]
  present = [text for text in printed if text != _MISSING]
  leaders = []
  if field.better and len(present) > 1:
    # Rows that print the same lead together.
    leader = field.better(present, key=float)
    leaders = [i for i, text in enumerate(printed) if text == leader]
  cells = [cell(*pair, spec=field.spec) for pair in zip(values, stderr, strict=True)]
  return field.title, cells, leaders


def _spec(values: Sequence[Any], stderr: Sequence[float | None]) -> str:
  """The format of a field that is not known: two digits of the largest standard error."""
  largest = max(filter(_is_present, stderr), default=0.0)
  if not largest > 0:
    whole = all(isinstance(value, numbers.Integral) for value in values if _is_present(value))
    return ',' if whole else '.4g'
  return f'.{max(0, 1 - math.floor(math.log10(largest)))}f'


def _ordered_fields(rows: Sequence[Row]) -> list[str]:
  """Known fields that some row has, in their order, then the others as they come."""
  others = dict.fromkeys(
    name
    for row in rows
    for name, value in row.items()
    if name not in _FIELDS and name != 'name' and isinstance(value, numbers.Number | str)
  )
  known = [name for name in _FIELDS if any(row.get(name) is not None for row in rows)]
  return [*known, *others]


def counted(number: int, noun: str) -> str:
  """'1 seed', '2 seeds'."""
  return f'{number:,} {noun}{"s" * (number != 1)}'


def shots_text(shots: float, noun: str = 'shot') -> str:
  """'1 shot', '5 shots'; '2.5%' for a share of each class. Without a noun '1', '5', '2.5%'."""
  if shots < 1:
    return f'{100 * shots:g}%'
  return counted(int(shots), noun) if noun else str(int(shots))


def p_text(p: float | None) -> str:
  """The p of a test, to four digits; a dash for None and NaN."""
  if not _is_present(p):
    return _MISSING
  return f'<{_LOWEST_SHOWN_P:g}' if p < _LOWEST_SHOWN_P else f'{p:.4f}'


def cell(value: Any, error: float | None = None, *, spec: str) -> str:
  """A value as text, with its standard error if there is one; a dash for None and NaN."""
  if not _is_present(value):
    return _MISSING
  text = format(value, spec) if isinstance(value, numbers.Number) else str(value)
  return f'{text} ±{error:{spec.lstrip("+")}}' if _is_present(error) else text


def _is_present(value: Any) -> bool:
  return value is not None and not (isinstance(value, numbers.Real) and math.isnan(value))
