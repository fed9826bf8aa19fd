"""What the site has besides docs/: pages of the root, the studies, figures, the API; and formulas.

The API has a page per room, with all its public modules: a new file is there by itself. Formulas
become MathML, which browsers draw without a script.
"""

import ast
import html
import posixpath
import re
from pathlib import Path

from latex2mathml import converter
from mkdocs.structure.files import File

ROOT = Path(__file__).parent
PACKAGE = ROOT / 'het_plugin'
# The pages of the root, the studies, examples and findings by their names on the site.
PAGES = {'index.md': 'README.md'}
PAGES |= {name: name for name in ('CHANGELOG.md', 'CONTRIBUTING.md', 'SECURITY.md', 'CITATION.cff')}
PAGES |= {
  str(path.relative_to(ROOT)): str(path.relative_to(ROOT))
  for pattern in ('examples/*.py', 'findings/*.sh', 'studies/README.md', 'studies/*/README.md')
  for path in ROOT.glob(pattern)
}
_FIGURE = re.compile(r'!\[(.*?)\]\(([\w./]*figures/[\w.]+)\)')
_LINK = re.compile(r'\]\((?!\w+:|#)([^)#\s]+)')  # relative
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_config(config):
  """Adds the pages of the API to the navigation."""
  (api,) = [entry for entry in config.nav if 'API' in entry]
  api['API'] = ['api/index.md', *(_page_of(room) for room in _rooms())]
  return config


def on_files(files, config):
  """Adds the pages that are not in docs/."""
  pages = {name: (ROOT / source).read_text() for name, source in PAGES.items()}
  pages['figures.md'] = _figures()
  pages['api/index.md'] = _overview()
  pages |= {_page_of(room): _reference(room, modules) for room, modules in _rooms().items()}
  for name, content in pages.items():
    files.append(File.generated(config, name, content=content))
  return files


def on_page_markdown(markdown, page, config, files):
  """On the site the pages of the root and those of docs/ are in one folder, above the studies."""
  return _with_links(markdown, page.file.src_uri)


def on_page_content(content, page, config, files):
  """Turns the formulas, which pymdownx.arithmatex has found, into MathML."""

  def mathml(match):
    tag, latex = match.groups()
    display = 'block' if tag == 'div' else 'inline'
    formula = converter.convert(html.unescape(latex), display=display)
    formula = formula.replace('<mi>&#x0007E;</mi>', '<mo>&#x223C;</mo>')  # \sim: a relation
    return f'<{tag} class="arithmatex">{formula}</{tag}>'  # the theme lets a wide one scroll

  return _FORMULA.sub(mathml, content)


def _with_links(markdown, name):
  """The text of a page with its relative links as they are between pages of the site."""
  source = PAGES.get(name, f'docs/{name}')

  def on_site(match):
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
    target = 'index.md' if target == 'README.md' else target.removeprefix('docs/')
    return f']({posixpath.relpath(target, posixpath.dirname(name) or ".")}'

  return _LINK.sub(on_site, markdown)


def _page_of(room):
  return f'api/{room}.md'


def _rooms():
  """{room: its public modules, the package itself first}, as dotted names."""
  rooms = {'nnx': ['het_plugin.nnx']}
  for path in sorted(PACKAGE.glob('*/**/*.py')):
    parts = path.relative_to(ROOT).with_suffix('').parts
    if parts[-1] == '__init__':
      parts = parts[:-1]
    if not any(part.startswith('_') for part in parts):
      rooms.setdefault(parts[1], []).append('.'.join(parts))
  return rooms


def _reference(room, modules):
  """The page of a room: its documentation, then a section per module."""
  members = str(len(modules) == 1).lower()
  text = [
    f'# {room}',
    f'::: {modules[0]}\n    options: {{members: {members}, show_root_heading: false}}',
  ]
  for module in modules[1:]:
    text.append(f'## {module.removeprefix(f"het_plugin.{room}.")}')
    text.append(f'::: {module}')
  return '\n\n'.join(text)


def _overview():
  """The page of the names that `het_plugin` has itself, and of its rooms, a line for each."""
  text = ['# Overview', '`from het_plugin import NAME` gives:', '| name | |\n|---|---|']
  lazy = [
    node for block in _tree('het_plugin').body if isinstance(block, ast.If) for node in block.body
  ]
  for room, name in ((node.module, alias.name) for node in lazy for alias in node.names):
    module = _definer(room, name)
    summary = _summary(module, name)
    text[-1] += f'\n| [`{name}`][{module}.{name}] | {summary} |'
  text += ['The rooms, each with a page:', '| room | |\n|---|---|']
  for room, (module, *_) in _rooms().items():
    text[-1] += f'\n| [{room}]({room}.md) | {_summary(module)} |'
  return '\n\n'.join(text)


def _definer(room, name):
  """The module from which the room imports the name."""
  imports = [x for x in _tree(room).body if isinstance(x, ast.ImportFrom)]
  return next(x.module for x in imports if name in [alias.name for alias in x.names])


def _summary(module, name=None):
  """The first paragraph of the documentation of a module, or of a class or function in it."""
  tree = _tree(module)
  if name is not None:
    tree = next(x for x in tree.body if getattr(x, 'name', None) == name)
  return ' '.join(ast.get_docstring(tree).split('\n\n')[0].split()).replace('|', r'\|')


def _tree(module):
  path = ROOT / module.replace('.', '/')
  path = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
  return ast.parse(path.read_text())


def _figures():
  """Every figure of the pages, with its caption and a link to its page."""
  text = ['# Figures']
  pages = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
  for path in [*pages, *sorted((ROOT / 'studies').glob('*/README.md'))]:
    target = posixpath.join('..', path.relative_to(ROOT))
    title = re.search('^# (.*)', path.read_text(), re.M)[1]
    for caption, figure in _FIGURE.findall(path.read_text()):
      name = Path(figure).name
      text += [f'![{caption}](figures/{name})', f'{caption} ([{title}]({target}))']
  return '\n\n'.join(text)
