"""The HTML page and what it says of its origin."""

import datetime
import html
import importlib.metadata
import re
import sys

from het_plugin import reporting

PNG = b'\x89PNG not really'
ROWS = [{'head': '<script>', 'nll': 1.0}, {'head': 'HET', 'nll': 2.0}]


def test_text_is_escaped_the_best_marked_and_references_apart():
  report = reporting.Report(
    title='<b>title',
    introduction='<i>&amp;',
    json=None,
    rows=ROWS,
    references=[{'head': 'chance', 'nll': 0.5}],
    notes=['note "one" <u>'],
    configs={'<b>': "x = '<y>'"},
  )
  document = report.page('<u>', [reporting.Figure(PNG, 'cap<tion', 'alt "text" <img>')])
  tags = set(re.findall(r'<(\w+)', document))
  assert not tags & {'script', 'i', 'b', 'u', 'y', 'tion'} and document.count('<img') == 1
  text = html.unescape(document)
  for given in ('<b>title', '<i>&amp;', '<script>', 'note "one" <u>', 'cap<tion', "x = '<y>'"):
    assert given in text
  assert 'alt="alt &#34;text&#34; &lt;img&gt;"' in document
  assert re.findall(r'<td class="best">([^<]*)<', document) == ['1.000']
  body, references = document.split('<tbody class="references">')
  assert 'chance' in references and 'chance' not in body


def test_provenance_is_the_command_the_versions_and_the_time(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['/a/path', '--gin.MODEL_DIR="x y"'])
  found = reporting.provenance('het_plugin.quickstart')
  assert found['command'] == """python -m het_plugin.quickstart '--gin.MODEL_DIR="x y"'"""
  assert found['versions']['jax'] == importlib.metadata.version('jax')
  assert found['versions']['python'] == '.'.join(map(str, sys.version_info[:3]))
  assert datetime.datetime.fromisoformat(found['created']).tzinfo is not None
