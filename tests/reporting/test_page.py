"""The HTML page and what it says of its origin."""

import base64
import datetime
import errno
import html
import importlib.metadata
import json
import os
import re
import sys

import pytest
from etils import epath

from het_plugin import reporting

PNG = b'\x89PNG not really'
ROWS = [{'name': '<script>', 'nll': 1.0}, {'name': 'HET', 'nll': 2.0}]


def test_text_is_escaped_the_best_marked_and_references_apart():
  report = reporting.Report(
    title='<b>title',
    introduction='<i>&amp;',
    json=None,
    rows=ROWS,
    references=[{'name': 'chance', 'nll': 0.5}],
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


def test_a_picture_has_a_version_for_a_dark_page():
  report = reporting.Report(title='', introduction='', json=None)
  picture = reporting.Picture(b'light', b'dark')
  document = report.page('x', [reporting.Figure(picture, 'seen', recolour=False)])
  encoded = [re.escape(base64.b64encode(png).decode()) for png in (picture.dark, picture.light)]
  assert re.search('scheme: dark.*{}.*<img src=.*{}'.format(*encoded), document, re.DOTALL)


def test_a_gallery_has_each_picture_with_its_text_and_name():
  report = reporting.Report(title='', introduction='', json=None)
  some = [
    reporting.Thumbnail(b'one', 'cat\n→ <dog>', 'a/1.png'),
    reporting.Thumbnail(b'2', 'b', 'c'),
  ]
  document = report.page(
    'x', [reporting.Gallery('worst <first>', some), reporting.Figure(PNG, 'p')]
  )
  found = re.findall(r'base64,([^"]*)" alt="([^"]*)" title="[^"]*">([^<]*)<span>', document)
  assert [(base64.b64decode(png), name, html.unescape(text)) for png, name, text in found] == [
    (x.png, x.name, x.text) for x in some
  ]
  assert 'worst &lt;first&gt;' in document and document.count('<figure') == 2


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
  report = reporting.Report(title='new', introduction='', json={'nll': 1.0}, draw=dict)
  report.write('x', output_dir=tmp_path)
  before = {path: path.read_bytes() for path in tmp_path.iterdir()}
  assert {path.name for path in before} == {'index.html', 'results.json', 'results.txt'}

  def fail(self, *args, **kwargs):
    with open(self, 'w') as file:
      file.write('half')
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  for method in ('open', 'write_bytes'):
    monkeypatch.setattr(type(epath.Path(tmp_path)), method, fail)
  with pytest.raises(OSError, match='results.json'):
    report.write('x', output_dir=tmp_path)
  with pytest.raises(OSError, match='index.html'):
    report.write('x', html=str(tmp_path / 'index.html'))
  assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_provenance_is_the_command_the_versions_and_the_time(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['/a/path', '--gin.MODEL_DIR="x y"'])
  found = reporting.provenance('het_plugin.quickstart')
  assert found['command'] == """python -m het_plugin.quickstart '--gin.MODEL_DIR="x y"'"""
  assert found['versions']['jax'] == importlib.metadata.version('jax')
  assert found['versions']['python'] == '.'.join(map(str, sys.version_info[:3]))
  assert datetime.datetime.fromisoformat(found['created']).tzinfo is not None


def test_a_plot_that_fails_loses_no_number(tmp_path):
  def draw():
    raise ZeroDivisionError

  writers = {'csv': lambda path: reporting.write_csv(['nll'], [{'nll': 0.5}], path)}
  report = reporting.Report(
    'title', 'of a file', {'nll': 0.5}, [{'name': 'a', 'nll': 0.5}], draw=draw, writers=writers
  )
  with pytest.raises(ZeroDivisionError):
    report.write('het_plugin.audit', output_dir=tmp_path, others={'csv': str(tmp_path / 'a.csv')})
  assert (tmp_path / 'a.csv').read_text() == 'nll\n0.5\n'
  assert json.loads((tmp_path / 'results.json').read_text()) == {'nll': 0.5}
  for name in ('results.txt', 'index.html'):
    assert '0.500' in (tmp_path / name).read_text()
