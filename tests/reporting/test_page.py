"""The HTML page and what it says of its origin."""

import datetime
import html
import importlib.metadata
import re
import sys

from het_plugin import reporting

PNG = b'\x89PNG not really'
ROWS = [{'head': '<script>', 'nll': 1.0}, {'head': 'HET', 'nll': 2.0}]
PROVENANCE = reporting.Provenance(
  'python -m x "<u>"', 'today', {'jax': '1.2'}, {'<b>': "x = '<y>'"}
)


def test_text_is_escaped_the_best_marked_and_references_apart():
  document = reporting.html_page(
    title='<b>title',
    introduction='<i>&amp;',
    rows=ROWS,
    references=[{'head': 'chance', 'nll': 0.5}],
    notes=['note "one" <u>'],
    figures=[reporting.Figure(PNG, 'cap<tion', 'alt "text" <img>')],
    provenance=PROVENANCE,
  )
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
  provenance = reporting.Provenance.of_this_process('het_plugin.quickstart', {'DET': 'a = 1'})
  assert provenance.command == """python -m het_plugin.quickstart '--gin.MODEL_DIR="x y"'"""
  assert provenance.versions['jax'] == importlib.metadata.version('jax')
  assert provenance.versions['python'] == '.'.join(map(str, sys.version_info[:3]))
  assert datetime.datetime.fromisoformat(provenance.created).tzinfo is not None
  assert provenance.configs == {'DET': 'a = 1'}
