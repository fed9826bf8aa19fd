"""What the site has besides docs/: pages of the root and of studies/, all figures, the API;
formulas.

The API has a page per room, with all its public modules: a new file is there by itself. Formulas
become MathML, which browsers draw without a script.
"""

import html
import re
from pathlib import Path

from latex2mathml import converter
from mkdocs.structure.files import File

ROOT = Path(__file__).parent
PACKAGE = ROOT / 'het_plugin'
# The pages of the root and the examples by their names on the site.
PAGES = {'index.md': 'README.md'}
PAGES |= {name: name for name in ('CHANGELOG.md', 'CONTRIBUTING.md', 'SECURITY.md', 'CITATION.cff')}
PAGES |= {
  f'examples/{path.name}': f'examples/{path.name}' for path in (ROOT / 'examples').glob('*.py')
}
STUDIES = [x for x in (ROOT / 'studies').glob('*/*') if x.suffix in ('.md', '.png', '.svg')]
_FIGURE = re.compile(r'!\[(.*?)\]\(((?:docs/)?figures/[\w.]+)\)')
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_config(config):
  """Adds the pages of the API to the navigation."""
  (api,) = [entry for entry in config.nav if 'API' in entry]
  api['API'] = [_page_of(room) for room in _rooms()]
  return config


def on_files(files, config):
  """Adds the pages that are not in docs/."""
  pages = {name: (ROOT / source).read_text() for name, source in PAGES.items()}
  pages['figures.md'] = _figures()
  pages |= {str(path.relative_to(ROOT)): path.read_bytes() for path in STUDIES}
  pages |= {_page_of(room): _reference(room, modules) for room, modules in _rooms().items()}
  for name, content in pages.items():
    files.append(File.generated(config, name, content=content))
  return files


def on_page_markdown(markdown, page, config, files):
  """On the site the pages of the root and those of docs/ are in one folder, above studies/."""
  if page.file.src_uri.startswith('studies/'):
    return markdown.replace('](../../docs/', '](../../')
  return re.sub(r'\]\((docs/|\.\./)', '](', markdown)


def on_page_content(content, page, config, files):
  """Turns the formulas, which pymdownx.arithmatex has found, into MathML."""

  def mathml(match):
    tag, latex = match.groups()
    display = 'block' if tag == 'div' else 'inline'
    formula = converter.convert(html.unescape(latex), display=display)
    formula = formula.replace('<mi>&#x0007E;</mi>', '<mo>&#x223C;</mo>')  # \sim: a relation
    return f'<{tag} class="arithmatex">{formula}</{tag}>'  # the theme lets a wide one scroll

  return _FORMULA.sub(mathml, content)


def _page_of(room):
  return f'api/{room}.md'


def _rooms():
  """{room: its public modules, the package itself first}, as dotted names."""
  rooms = {}
  for path in sorted(PACKAGE.glob('*/**/*.py')):
    parts = path.relative_to(ROOT).with_suffix('').parts
    if parts[-1] == '__init__':
      parts = parts[:-1]
    if not any(part.startswith('_') for part in parts):
      rooms.setdefault(parts[1], []).append('.'.join(parts))
  return rooms


def _reference(room, modules):
  """The page of a room: its documentation, then a section per module."""
  text = [
    f'# {room}',
    f'::: {modules[0]}\n    options: {{members: false, show_root_heading: false}}',
  ]
  for module in modules[1:]:
    text.append(f'## {module.removeprefix(f"het_plugin.{room}.")}')
    text.append(f'::: {module}')
  return '\n\n'.join(text)


def _figures():
  """Every figure of the pages, with its caption and a link to its page."""
  text = ['# Figures']
  for path in [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]:
    target = 'index.md' if path.name == 'README.md' else path.name
    for caption, figure in _FIGURE.findall(path.read_text()):
      text += [f'![{caption}]({figure})', f'{caption} ([{target.removesuffix(".md")}]({target}))']
  return '\n\n'.join(text)
