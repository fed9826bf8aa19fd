"""Finds and parses gin files, in an installed package and in a checkout."""

import difflib
import logging as stdlib_logging
import math
import os
import re
import tokenize
from collections.abc import Sequence
from pathlib import Path

import gin
from het_plugin.config import checks, registry, statements

PACKAGE = Path(__file__).parents[1]
_PREFIX = 'het_plugin/gin/'
_BUILTIN = 'het_plugin/gin/builtin/train.gin'


def gin_root() -> Path:
  """The folder of our gin files: inside an installed package, or beside it in a checkout."""
  installed = PACKAGE / 'gin'
  return installed if installed.is_dir() else PACKAGE.parent / 'gin'


def resolve(path: str) -> str:
  """Maps 'het_plugin/gin/heads/het_xl.gin' to the path of the file; other paths are unchanged."""
  return str(gin_root() / path.removeprefix(_PREFIX)) if path.startswith(_PREFIX) else path


def install_file_reader() -> None:
  """Makes `include 'het_plugin/gin/...'` work in a checkout, where gin/ is not a package."""
  gin.config.register_file_reader(lambda path: open(resolve(path)), _is_ours)
  # gin asks its own package reader first, and each search path, which logs errors for files that
  # are then found. `parse_config` names those that are not.
  stdlib_logging.getLogger().addFilter(
    lambda record: not record.getMessage().startswith('Path not found: ')
  )


def _is_ours(path: str) -> bool:
  return path.startswith(_PREFIX) and os.path.isfile(resolve(path))


def parse_config(
  gin_files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str] = ('.',)
) -> None:
  """Replaces the gin configuration by that of the files and, after them, of the bindings.

  Registers the built-in trainer, and reads gin/builtin/train.gin, which has what only that trainer
  knows, before the files.

  Raises:
    ValueError: a file cannot be found or includes itself, a binding has wrong syntax, or gin does
      not know a name.
  """
  if not gin_files:
    example = '--gin_file=gin/runs/digits_smoke.gin --gin_file=gin/heads/het_xl.gin'
    raise ValueError(f'no --gin_file is given: take a run and a head, such as {example}')
  gin.clear_config()
  registry.register_trainer()
  for path in search_paths:
    gin.add_config_file_search_path(path)
  for file in gin_files:
    if not any(os.path.isfile(os.path.join(path, resolve(file))) for path in ('', *search_paths)):
      searched = '' if os.path.isabs(file) else f' in {", ".join(search_paths)}'
      wrong = 'is a folder' if os.path.isdir(file) else f'does not exist{searched}'
      raise ValueError(f'gin_file={file!r} {wrong}{_instead_of(file)}')
  try:
    for file in [_BUILTIN, *gin_files]:
      what = f'gin_file={file!r}, or a file that it includes,'
      try:
        gin.parse_config_file(file)
      except RecursionError as error:
        raise ValueError(f'gin_file={file!r} includes itself') from error
      except UnicodeDecodeError as error:
        raise ValueError(f'{what} is not valid UTF-8: {error}') from error
      except tokenize.TokenError as error:  # a bracket or quote without its end is no SyntaxError
        raise ValueError(f'{what} is not valid gin: {error.args[0]}') from error
    for binding in bindings:
      try:
        gin.parse_config(binding)
      except (SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f'the binding {binding!r} is wrong: {_reason(binding, error)}') from error
  except OSError as error:
    if match := re.search(r'Unable to open file: (\S+)\. ', str(error)):
      raise ValueError(
        f'{match[1]} is included but does not exist{_instead_of(match[1])}'
      ) from error
    raise
  except ValueError as error:
    what, _, where = str(error).partition('\n')
    if explained := _explained(what):
      raise ValueError(f'{explained}\n{where}') from error
    raise
  _check_finite()
  checks.check(gin.config_str())
  gin.finalize()


def _check_finite() -> None:
  """Raises ValueError for a number such as 1e400, which is inf: no text of gin can have it."""
  for (scope, selector), arguments in gin.config._CONFIG.items():
    for parameter, value in arguments.items():
      if not all(map(math.isfinite, statements.inside(value, float))):
        gin.clear_config()
        name = '/'.join(filter(None, (scope, f'{selector}.{parameter}')))
        raise ValueError(f'{name.removesuffix("/gin.macro.value")} = {value} must be finite')


def as_typed(message: str) -> str:
  """A message with the macros that the parsed configuration binds in place of their parameters.

  For example, 'eval_steps=0 must be at least 1' is 'EVAL_STEPS=0 must be at least 1'.
  """
  bound, macros = statements.parse(gin.config_str())
  for key, macro in bound.items():
    if isinstance(macro, statements.Macro) and macro.name not in message:
      value = macros.get(macro.name)
      _, configurable, parameter = statements.split(key)
      said = rf'(?<![\w./])({configurable}\.)?{parameter}(?=={re.escape(str(value))}(?![\w.]*\w))'
      message = re.sub(said, macro.name, message)
  return message


def _instead_of(file: str) -> str:
  """What is there in place of a gin file that is not: the file of this name or folder in ours."""
  ours = _PREFIX + file.removeprefix(_PREFIX).removeprefix('gin/')
  if _is_ours(ours):
    return f'; {ours} comes with the package'
  folder = Path(file).parent if os.path.isabs(file) else Path(resolve(ours)).parent
  if os.path.isdir(file):
    folder = Path(file)
  names = sorted(path.name for path in folder.glob('*.gin'))
  return f': choose from {", ".join(names)}' if names else ''


def _explained(message: str) -> str | None:
  """What to do where gin does not know a parameter or a name: a name that is known and similar."""
  if match := re.match(r"Configurable '(.+)' doesn't have a parameter named '(.+)'", message):
    known = checks.parameters(match[1])
  elif match := re.match(r"(No configurable matching) .*?(\w+)(\(\))?'", message):
    known = {name for _, name in registry.registered}
  else:
    return None
  similar = difflib.get_close_matches(match[2], known, 1)
  return f'{message.rstrip(".")}: did you mean {similar[0]}?' if similar else None


def _reason(binding: str, error: SyntaxError | tokenize.TokenError) -> str:
  """What is wrong with a binding; for text without quotes, the command with them."""
  name, _, value = (part.strip() for part in binding.partition('='))
  if re.fullmatch(r'[A-Za-z./~][^\'"\n]*', value):
    reference = f', or an object @ and (): @{value}()' if registry.is_registered(value) else ''
    return f"""text needs quotes: --gin.{name}="'{value}'"{reference}"""
  return str(error) if isinstance(error, SyntaxError) else error.args[0]
