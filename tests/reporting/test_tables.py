"""Rows of results as aligned text and as JSON."""

import json
import math

import numpy as np

from het_plugin import reporting
from het_plugin.reporting.columns import columns, problem_line

ROWS = [
  {
    'head': 'DET',
    'num_classes': 2297,
    'mesh': '4x2',
    'nll': 1.25,
    'precision_at_1': 0.5,
    'tau': 1.0,
  },
  {'head': 'HET', 'num_classes': 2297, 'mesh': '4x2', 'nll': 1.125, 'precision_at_1': 0.5004},
  {'head': 'HET-XL', 'num_classes': 2297, 'mesh': '4x2', 'nll': math.nan, 'precision_at_1': 0.25},
]
CEILING = {'head': 'ceiling', 'precision_at_1': 0.9, 'nll': None}


def column(rows, title, num_references=0):
  (found,) = [c for c in columns(rows, num_references) if c.title == title]
  return found


def test_the_lowest_nll_and_the_highest_precision_are_best():
  assert column(ROWS, 'NLL').best == {1}
  assert column(ROWS, 'NLL').cells == ('1.250', '1.125', '–')
  assert column(ROWS, 'prec@1').best == {0, 1}  # both print 0.500


def test_the_problem_is_stated_once_where_rows_agree():
  assert problem_line(ROWS) == 'classes K 2,297, mesh 4x2'
  assert 'mesh' not in {c.title for c in columns(ROWS)}
  other = [*ROWS[:2], {**ROWS[2], 'mesh': '8x1'}]
  assert problem_line(other) == 'classes K 2,297'
  assert column(other, 'mesh').cells == ('4x2', '4x2', '8x1')


def test_few_shot_tables_by_data_set_with_errors():
  rows = [
    {
      'head': 'DET',
      'fewshot': {'digits': {'10': 0.8, '1': 0.5}, 'birds': {1: 0.25}},  # JSON has string keys
      'fewshot_stderr': {'digits': {10: 0.01, 1: None}},
    },
    {'head': 'HET', 'fewshot': {'digits': {1: 0.75, 10: 0.7}}},
  ]
  found = [(c.group, c.title, c.cells, set(c.best)) for c in columns(rows)]
  assert found == [
    ('few-shot accuracy digits', '1 shot', ('0.500', '0.750'), {1}),
    ('few-shot accuracy digits', '10 shots', ('0.800 ±0.010', '0.700'), {0}),
    ('few-shot accuracy birds', '1 shot', ('0.250', '–'), set()),
  ]


def test_errors_and_further_tables_by_title():
  rows = [
    {'head': 'a', 'nll': 1.0, 'stderr': {'nll': 0.25}},
    {
      'head': 'b',
      'nll': 2.0,
      'stderr': {'nll': None},
      'tables': {'against a': {'nll': -0.5, 'rate': 0.125, 'stderr': {'nll': 0.125}}},
    },
  ]
  assert [(c.group, c.title, c.cells) for c in columns(rows)] == [
    ('', 'NLL', ('1.000 ±0.250', '2.000')),
    ('against a', 'NLL', ('–', '-0.500 ±0.125')),
    ('against a', 'rate', ('–', '0.125')),
  ]
  text = reporting.text_table(rows, row_title='checkpoint')
  assert text.startswith('checkpoint ') and '\nagainst a ' in text and 'head' not in text


def test_text_is_aligned_with_references_below_a_rule():
  lines = reporting.text_table(ROWS, [CEILING, {'head': 'unseen', 'fewshot': {}}]).splitlines()
  header, rule = lines[2], lines[3]
  assert lines[0] == 'classes K 2,297, mesh 4x2'
  assert set(rule) == {'-'} == set(lines[7]) and len(rule) == max(map(len, lines))
  assert [line.split()[0] for line in lines[4:7]] == ['DET', 'HET', 'HET-XL']
  assert lines[8].startswith('ceiling') and len(lines) == 9  # 'unseen' has nothing to show
  assert lines[5].index('1.125*') + 5 == header.index('NLL') + 3


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


def test_fields_of_ones_own_have_the_digits_that_their_errors_allow():
  rows = [
    {'head': 'a', 'size': 0.98721, 'stderr': {'size': 0.002564}},
    {'head': 'b', 'size': 0.2094, 'stderr': {'size': 0.00080}},
  ]
  text = reporting.text_table(rows)
  assert '0.9872 ±0.0026' in text and '0.2094 ±0.0008' in text
  rows = [{'head': 'a', 'size': 1234.5, 'stderr': {'size': 31.0}}]
  assert '1234 ±31' in reporting.text_table(rows) and '0.5 ±0' in reporting.text_table(
    [{'head': 'a', 'size': 0.5, 'stderr': {'size': 0.0}}]
  )
