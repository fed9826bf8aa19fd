"""gin on the command line as t5x has it, and gin files that are found wherever the package is
installed.
"""

import contextlib
import logging as stdlib_logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import app, flags, logging

import gin
from het_plugin.config import distributed
from het_plugin.training import exit_codes

PACKAGE = Path(__file__).parents[1]
_PREFIX = 'het_plugin/gin/'
_BUILTIN = 'het_plugin/gin/builtin/train.gin'
_FLAG_PREFIX = '--gin.'


def gin_root() -> Path:
  """The folder of our gin files: inside the package where a wheel was installed, beside it in a
  checkout.
  """
  installed = PACKAGE / 'gin'
  return installed if installed.is_dir() else PACKAGE.parent / 'gin'


def resolve(path: str) -> str:
  """'het_plugin/gin/heads/het_xl.gin' to the file's place; any other path unchanged."""
  return str(gin_root() / path.removeprefix(_PREFIX)) if path.startswith(_PREFIX) else path


def install_file_reader() -> None:
  """Lets `include 'het_plugin/gin/...'` work from a checkout too, where gin/ is no package that gin
  could look into.
  """
  gin.config.register_file_reader(_open_ours, _is_ours)
  # gin asks its own package reader first, which reports as an error, on the root logger, what ours
  # then finds
  stdlib_logging.getLogger().addFilter(
    lambda record: not record.getMessage().startswith(f'Path not found: {_PREFIX}')
  )


def _open_ours(path: str):
  return open(resolve(path))


def _is_ours(path: str) -> bool:
  return path.startswith(_PREFIX) and os.path.isfile(resolve(path))


def define_flags() -> None:
  """Flags of every main: --gin_file (repeatable), --gin_bindings, --gin_search_paths, and
  --gin.NAME=VALUE.
  """
  flags.DEFINE_multi_string(
    'gin_file', [], 'Path of a gin file; may be given several times, later ones win.'
  )
  define_binding_flags()


def define_binding_flags() -> None:
  """Those of `define_flags` but for --gin_file, for a main that finds its files itself."""
  flags.DEFINE_multi_string(
    'gin_bindings', [], 'A gin binding, "NAME=VALUE"; the same as --gin.NAME=VALUE.'
  )
  flags.DEFINE_list('gin_search_paths', ['.'], 'Folders in which gin files are looked for.')


def rewrite_flags(argv: Sequence[str]) -> list[str]:
  """Turns --gin.NAME=VALUE into --gin_bindings=NAME=VALUE, which absl can parse."""
  rewritten = [argv[0]]
  for argument in argv[1:]:
    if argument.startswith(_FLAG_PREFIX):
      name, equals, value = argument.removeprefix(_FLAG_PREFIX).partition('=')
      if not equals:
        sys.exit(f'Error: {argument} lacks its value: write {argument}=VALUE')
      argument = f'--gin_bindings={name} = {value}'
    rewritten.append(argument)
  return rewritten


def parse_config(
  gin_files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str] = ('.',)
) -> None:
  """Replaces the gin configuration by that of the files and, after them, the bindings.

  What only the built-in trainer has, gin/builtin/train.gin, is read before them.

  Raises:
    ValueError: a file that cannot be found, with the place it was looked for; anything that gin
      does not understand.
  """
  gin.clear_config()
  for path in search_paths:
    gin.add_config_file_search_path(path)
  for file in gin_files:
    if not any(os.path.isfile(os.path.join(path, resolve(file))) for path in ('', *search_paths)):
      raise ValueError(f'gin_file={file!r} does not exist in {", ".join(search_paths)}')
  gin.parse_config_files_and_bindings([_BUILTIN, *gin_files], list(bindings))


def one_sentence(error: BaseException) -> str:
  """An error's message on one line, without the call sites that gin appends to it."""
  text = str(error).strip() or type(error).__name__
  if unbound := re.match(r"No bindings specified for '(.+)/gin\.macro'", text):
    return f'{unbound[1]} is not set: bind it in a gin file or with --gin.{unbound[1]}=VALUE'
  lines = [line.strip() for line in text.splitlines()]
  return ' '.join(line for line in lines if line and not line.startswith('In call to configurable'))


@contextlib.contextmanager
def one_sentence_errors():
  """Ends the program with one line and exit code 2 where a setting is wrong.

  `--verbosity=1` gives the traceback instead.
  """
  try:
    yield
  except exit_codes.SETTING_ERRORS as error:
    if logging.level_debug() or exit_codes.is_lost_connection(error):
      raise
    logging.flush()
    print(f'Error: {one_sentence(error)} (--verbosity=1 shows where)', file=sys.stderr)
    sys.exit(exit_codes.WRONG_SETTING)


def run(main: Callable[[Sequence[str]], None]) -> None:
  """Runs a main with our flags and logging to stderr."""
  logging.set_stderrthreshold('info')
  stdlib_logging.getLogger('het_plugin').setLevel(stdlib_logging.INFO)
  # orbax tells each of the some thirty things that it does to write a checkpoint, gin each file
  # that it looks for.
  chatty = re.compile(f'/orbax/checkpoint/|{re.escape(os.path.dirname(gin.__file__))}')
  logging.get_absl_handler().addFilter(
    lambda record: record.levelno > stdlib_logging.INFO or not chatty.search(record.pathname)
  )
  jax.config.parse_flags_with_absl()
  app.run(
    distributed.leaving()(main),
    flags_parser=lambda argv: app.parse_flags_with_usage(rewrite_flags(argv)),
  )
