"""Rows of results as aligned text and as JSON."""

import csv
import json
import math
from collections.abc import Sequence

import numpy as np

from het_plugin import reporting
from het_plugin.reporting.columns import tables_of
from het_plugin.reporting.text import text_table
from het_plugin.system import terminal

ROWS = [
  {
    'name': 'DET',
    'num_classes': 2297,
    'mesh': '4x2',
    'nll': 1.25,
    'precision_at_1': 0.5,
    'tau': 1.0,
  },
  {'name': 'HET', 'num_classes': 2297, 'mesh': '4x2', 'nll': 1.125, 'precision_at_1': 0.5004},
  {'name': 'HET-XL', 'num_classes': 2297, 'mesh': '4x2', 'nll': math.nan, 'precision_at_1': 0.25},
]
CEILING = {'name': 'ceiling', 'precision_at_1': 0.9, 'nll': None}


def columns(rows):
  """{(number of the table, title): (cells, the best rows)}."""
  return {
    (number, title): ([line[j] for line in found.lines], {i for i, k in found.best if k == j})
    for number, found in enumerate(tables_of(rows))
    for j, title in enumerate(found.header[1:], 1)
  }


def test_a_p_that_is_not_defined_is_a_dash():
  found = [reporting.p_text(p) for p in (None, math.nan, 1e-9, 0.25)]
  assert found == ['–', '–', '<0.0001', '0.2500']


def test_the_lowest_nll_and_the_highest_precision_are_best():
  found = columns(ROWS)
  assert found[0, 'NLL'] == (['1.250', '1.125', '–'], {1})
  assert found[0, 'prec@1'][1] == {0, 1}  # both print 0.500


def test_the_problem_is_stated_once_where_rows_agree():
  assert tables_of(ROWS)[0].caption == 'classes K 2,297, mesh 4x2'
  assert 'mesh' not in tables_of(ROWS)[0].header
  other = [*ROWS[:2], {**ROWS[2], 'mesh': '8x1'}]
  assert tables_of(other)[0].caption == 'classes K 2,297'
  assert columns(other)[0, 'mesh'][0] == ['4x2', '4x2', '8x1']


def test_few_shot_tables_by_data_set_with_errors():
  rows = [
    {
      'name': 'DET',
      'fewshot': {'digits': {10: 0.8, 1: 0.5}, 'birds': {1: 0.25}},
      'fewshot_stderr': {'digits': {10: 0.01, 1: None}},
    },
    {'name': 'HET', 'fewshot': {'digits': {1: 0.75, 10: 0.7}}},
  ]
  assert [reporting.counted(n, 'seed') for n in (0, 1, 2000)] == [
    '0 seeds',
    '1 seed',
    '2,000 seeds',
  ]
  captions = [found.caption for found in tables_of(rows)]
  assert captions == ['few-shot accuracy digits', 'few-shot accuracy birds']
  assert columns(rows) == {
    (0, '1 shot'): (['0.500', '0.750'], {1}),
    (0, '10 shots'): (['0.800 ±0.010', '0.700'], {0}),
    (1, '1 shot'): (['0.250', '–'], set()),
  }


def test_errors_and_further_tables_by_title():
  rows = [
    {'name': 'a', 'nll': 1.0, 'stderr': {'nll': 0.25}},
    {
      'name': 'b',
      'nll': 2.0,
      'stderr': {'nll': None},
      'tables': {'against a': {'nll': -0.5, 'rate': 0.125, 'stderr': {'nll': 0.125}}},
    },
  ]
  assert [found.caption for found in tables_of(rows)] == ['', 'against a']
  assert {key: cells for key, (cells, _) in columns(rows).items()} == {
    (0, 'NLL'): ['1.000 ±0.250', '2.000'],
    (1, 'NLL'): ['–', '-0.500 ±0.125'],
    (1, 'rate'): ['–', '0.125'],
  }
  text = text_table(rows, row_title='checkpoint')
  assert text.startswith('checkpoint ') and '\nagainst a ' in text and 'name' not in text


def test_text_is_aligned_with_references_below_a_rule():
  lines = text_table(ROWS, [CEILING, {'name': 'unseen', 'fewshot': {}}]).splitlines()
  header = lines[2]
  rule = lines[3]
  assert lines[0] == 'classes K 2,297, mesh 4x2'
  assert set(rule) == {'-'} == set(lines[7]) and len(rule) == max(map(len, lines))
  assert [line.split()[0] for line in lines[4:7]] == ['DET', 'HET', 'HET-XL']
  assert lines[8].startswith('ceiling') and len(lines) == 9  # 'unseen' has nothing to show
  assert lines[5].index('1.125*') + 5 == header.index('NLL') + 3


def test_a_name_with_a_line_break_is_one_line_of_a_table():
  names = ['a\nb', 'tab\tcat', 'c']
  rows = [{'name': name, 'nll': float(i), 'note': name} for i, name in enumerate(names)]
  lines = text_table(rows).splitlines()
  assert len(lines) == 5
  assert lines[2].startswith('a b ') and lines[2].endswith(' a b')
  assert lines[3].startswith('tab cat ') and lines[3].endswith(' tab cat')


def test_json_has_plain_values_only(tmp_path):
  path = tmp_path / 'new' / 'rows.json'
  row = {
    'nll': np.float32(0.5),
    'ece': math.nan,
    'tau': np.inf,
    'fewshot': {1: np.float64(0.25), 5: [np.int32(3)]},
    'curve': np.array([1.0, np.nan]),
  }
  reporting.write_json([row], path)
  assert json.loads(path.read_text()) == [
    {'nll': 0.5, 'ece': None, 'tau': None, 'fewshot': {'1': 0.25, '5': [3]}, 'curve': [1.0, None]}
  ]


class Made(Sequence):
  """Rows that are made when they are asked for."""

  def __len__(self):
    return 3

  def __getitem__(self, i):
    if i >= 3:
      raise IndexError
    return {'i': i, 'empty': [[], {}, ()], 'name': 'é "1"'}


def test_files_of_commands_are_told_from_others(tmp_path):
  path = tmp_path / 'file'
  reporting.write_json([{'name': 'a', 'nll': 0.5}], path)
  assert reporting.written_here('json', path)
  path.write_text('{\n  "name": "a package",\n  "version": "1.0"\n}\n')
  assert not reporting.written_here('json', path)
  reporting.write_csv(['index', 'suggested'], [{'index': 1, 'suggested': 2}], path)
  assert reporting.written_here('csv', path)
  path.write_text('file,label,annotator\na.png,wren,eva\n')
  assert not reporting.written_here('csv', path) and not reporting.written_here('html', path)
  path.write_text('')
  assert reporting.written_here('csv', path)  # nothing is lost


def test_a_sequence_that_is_not_in_memory_is_the_text_of_its_list(tmp_path):
  reporting.write_json({'rows': Made(), 'none': None}, tmp_path / 'a.json')
  expected = json.dumps({'rows': list(Made()), 'none': None}, indent=2) + '\n'
  assert (tmp_path / 'a.json').read_text() == expected


def test_fields_of_ones_own_have_the_digits_that_their_errors_allow():
  rows = [
    {'name': 'a', 'size': 0.98721, 'stderr': {'size': 0.002564}},
    {'name': 'b', 'size': 0.2094, 'stderr': {'size': 0.00080}},
  ]
  text = text_table(rows)
  assert '0.9872 ±0.0026' in text and '0.2094 ±0.0008' in text
  rows = [{'name': 'a', 'size': 1234.5, 'stderr': {'size': 31.0}}]
  assert '1234 ±31' in text_table(rows) and '0.5 ±0' in text_table(
    [{'name': 'a', 'size': 0.5, 'stderr': {'size': 0.0}}]
  )


def test_a_spreadsheet_computes_nothing_and_a_reader_gets_the_text_back(tmp_path):
  texts = ['=1+1', '+1', '-1', '@x', '\tx', '\r=1', '＝1', "'", "'=1", 'a=1', 'it\'s, "x"', '']
  path = tmp_path / 'new' / 'a.csv'
  reporting.write_csv(['text', 'number'], ({'text': x, 'number': -1.5} for x in texts), path)
  with path.open(newline='', encoding='utf-8') as file:
    read = list(csv.DictReader(file))
  assert all(row['text'][:1] not in [*'=+-@\t\r＝'] for row in read)
  assert [terminal.as_typed(row['text']) for row in read] == texts
  assert {row['number'] for row in read} == {'-1.5'}
