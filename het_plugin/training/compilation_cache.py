"""Compiled programs kept in a run's directory, so that a restart need not compile again."""

import contextlib
from collections.abc import Iterator

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

FOLDER = 'compilation_cache'


@contextlib.contextmanager
def in_directory(model_dir: epath.Path) -> Iterator[None]:
  """Keeps programs that are compiled in this context in a folder of the run.

  JAX_COMPILATION_CACHE_DIR or --jax_compilation_cache_dir name another folder, and
  JAX_ENABLE_COMPILATION_CACHE=false leaves it empty. All processes read, process 0 writes.
  """
  if jax.config.jax_compilation_cache_dir:
    yield
    return
  compilation_cache.set_cache_dir(str(model_dir / FOLDER))
  # All programs: those of the checksums are small, but together they take a second to compile.
  shortest = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  try:
    yield
  finally:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', shortest)
    compilation_cache.set_cache_dir(None)
    compilation_cache.reset_cache()  # the next run in this process has another folder
