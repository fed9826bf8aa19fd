"""The HTML page, read back with a parser."""

import datetime
import html.parser
import importlib.metadata
import sys

from het_plugin import reporting

PNG = b'\x89PNG not really'
VOID = {'meta', 'img'}
ROWS = [{'head': '<script>', 'nll': 1.0}, {'head': 'HET', 'nll': 2.0}]
PROVENANCE = reporting.Provenance(
  'python -m x "<u>"', 'today', {'jax': '1.2'}, {'<b>': "x = '<y>'"}
)


class Page(html.parser.HTMLParser):
  """Checks that tags close in order; keeps the tags, the text by its innermost tag, and whatever an
  attribute names that could lie elsewhere.
  """

  def __init__(self, document):
    super().__init__()
    self.open, self.tags, self.text, self.sources = [], set(), [], []
    self.feed(document)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attrs):
    attributes = dict(attrs)
    self.tags.add(tag)
    self.sources += [attributes[name] for name in ('src', 'href', 'srcset') if name in attributes]
    if tag not in VOID:
      self.open.append((tag, attributes.get('class')))

  def handle_endtag(self, tag):
    assert self.open.pop()[0] == tag

  def handle_data(self, data):
    if data.strip():
      self.text.append((*self.open[-1], data.strip()))

  def of(self, tag, css_class=None):
    return [data for *where, data in self.text if where == [tag, css_class]]


def test_all_text_is_escaped():
  document = reporting.html_page(
    title='<b>title',
    introduction='<i>&amp;',
    rows=[*ROWS, {'head': 'DET', 'note': '<i>'}],
    notes=['note "one" <u>'],
    figures=[reporting.Figure(PNG, 'cap<tion', 'alt "text" <img>')],
    provenance=PROVENANCE,
  )
  page = Page(document)
  assert not page.tags & {'script', 'i', 'b', 'u', 'y'}
  assert document.count('<img') == 1
  assert 'alt="alt &#34;text&#34; &lt;img&gt;"' in document
  text = [data for *_, data in page.text]
  assert {'<i>&amp;', '<script>', '<i>', 'note "one" <u>', 'cap<tion'} <= set(text)
  assert page.of('title') == page.of('h1') == ['<b>title']
  assert page.of('pre') == ['python -m x "<u>"', "x = '<y>'"]
  assert page.of('summary') == ['Configuration: <b>']


def test_the_best_is_marked_and_references_stand_apart():
  document = reporting.html_page(
    title='',
    introduction='',
    rows=ROWS,
    provenance=PROVENANCE,
    references=[{'head': 'chance', 'nll': 0.5}],
  )
  page = Page(document)
  assert page.of('td', 'best') == ['1.000'] and page.of('td') == ['2.000', '0.500']
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
