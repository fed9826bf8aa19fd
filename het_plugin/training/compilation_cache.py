"""Compiled programs kept in a run's directory, so that a restart need not compile again."""

import contextlib
import logging
import os
from collections.abc import Iterator

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

_log = logging.getLogger(__name__)

FOLDER = 'compilation_cache'


@contextlib.contextmanager
def in_directory(model_dir: epath.Path) -> Iterator[None]:
  """Keeps programs that are compiled in this context in a folder of the run.

  JAX_COMPILATION_CACHE_DIR or --jax_compilation_cache_dir name another folder, and
  JAX_ENABLE_COMPILATION_CACHE=false leaves it empty. All processes read, process 0 writes. The
  programs are native code, so a folder with a file of another user is not read.
  """
  if jax.config.jax_compilation_cache_dir:
    yield
    return
  folder = model_dir / FOLDER
  if (foreign := _of_another_user(folder)) is not None:
    _log.warning('%s belongs to another user, so its programs are compiled anew.', foreign)
    yield
    return
  compilation_cache.set_cache_dir(str(folder))
  # Small programs too: the checksums' programs together take a second to compile.
  shortest = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  try:
    yield
  finally:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', shortest)
    compilation_cache.set_cache_dir(None)
    compilation_cache.reset_cache()  # the next run in this process has another folder


def _of_another_user(folder: epath.Path) -> str | None:
  """The folder, or a file in it, if it has another owner; None if not, or in an object store."""
  for path in (folder, *(folder.iterdir() if folder.is_dir() else ())):
    with contextlib.suppress(FileNotFoundError):  # an object store, or another process removed it
      if os.stat(path).st_uid != os.geteuid():
        return str(path)
  return None
