"""Gin files, found wherever the package is installed, and their configuration."""

import logging as stdlib_logging
import os
from collections.abc import Sequence
from pathlib import Path

import gin

PACKAGE = Path(__file__).parents[1]
_PREFIX = 'het_plugin/gin/'
_BUILTIN = 'het_plugin/gin/builtin/train.gin'


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
