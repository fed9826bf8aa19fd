"""Limits the imports of the configuration of another person's run.

gin imports the modules that a file names, which runs their code. With `dynamic_registration` a file
can also call any function of these modules, such as os.system.
"""

import importlib
import sys
import tokenize
from collections.abc import Collection

from absl import flags

from gin import config_parser
from het_plugin.config import statements

# Packages whose modules a foreign configuration may import and refer to.
ALLOWED = ('het_plugin', 't5x', 'flax', 'optax', 'seqio')
_DYNAMIC = '__gin__.dynamic_registration'


def define_flags() -> None:
  """The flag --allow_imports, which `check` reads."""
  flags.DEFINE_list(
    'allow_imports',
    [],
    'Packages that the config.gin of a run that is opened may import, which runs their code, '
    f'besides {", ".join(ALLOWED)}.',
  )


def check(text: str, file: str) -> None:
  """Checks the configuration of a run before gin reads it.

  Modules that this process has already imported are allowed, because no code runs again.

  Raises:
    ValueError: it imports or includes something else, or is not valid gin.
  """
  given = flags.FLAGS['allow_imports'].value if 'allow_imports' in flags.FLAGS else []
  allowed = {*ALLOWED, *given}
  symbols, selectors, is_dynamic = {}, [], False
  try:
    for _, statement in statements.statements(text):
      if isinstance(statement, config_parser.IncludeStatement):
        raise ValueError(f'{file} includes {statement.filename!r}, which a config.gin never does')
      if isinstance(statement, config_parser.BindingStatement):
        selectors += [statement.selector] if statement.arg_name else []
        found = statements.inside(statement.value, statements.Reference)
        selectors += [reference.name.rpartition('/')[2] for reference in found]
      if isinstance(statement, config_parser.ImportStatement):
        is_dynamic |= statement.module == _DYNAMIC
        if statement.module != _DYNAMIC:
          _check_import(statement.module, file, allowed)
          symbols[statement.bound_name()] = statement
  except (SyntaxError, tokenize.TokenError) as error:
    raise ValueError(f'{file} is not valid gin: {error}') from error
  for selector in selectors if is_dynamic else ():
    _check_reference(selector, symbols, file, allowed)


def _check_import(module: str, file: str, allowed: Collection[str]) -> None:
  parents = module.split('.')
  prefixes = {'.'.join(parents[: i + 1]) for i in range(len(parents))}
  if not prefixes & set(allowed) and module not in sys.modules:
    raise ValueError(
      f'{file} imports {module}, which may run any code: --allow_imports={parents[0]} permits it'
    )


def _check_reference(
  selector: str,
  symbols: dict[str, config_parser.ImportStatement],
  file: str,
  allowed: Collection[str],
) -> None:
  """Checks the origin of the object with a name, and of all modules on the way to it."""
  first, *rest = selector.split('.')
  if first == 'gin':
    return
  if first not in symbols:
    raise ValueError(f'{file} refers to {selector}, which it does not import')
  statement = symbols[first]
  found = importlib.import_module(statement.module)
  if not (statement.is_from or statement.alias):
    found = sys.modules[first]
  for name in ('', *rest):
    found = getattr(found, name, None) if name else found
    home = getattr(found, '__module__', None) or getattr(found, '__name__', 'nothing')
    if not any(home == x or home.startswith(f'{x}.') for x in allowed):
      raise ValueError(
        f'{file} refers to {selector}, which is of {home}: --allow_imports={home.split(".")[0]} '
        'permits it'
      )
