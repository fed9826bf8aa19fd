"""gin's configuration as a value: kept, put back, and made current for a while.

gin has one configuration per process. A run that is opened has its own, which must not replace that
of the program that opens it.
"""

import contextlib
from collections.abc import Generator
from typing import Any

from gin import config as gin_config

# All that `gin.clear_config` and parsing change; the last one is the search paths of files. What is
# registered stays registered.
_STORES = ('_CONFIG', '_IMPORTS', '_SINGLETONS', '_OPERATIVE_CONFIG', '_LOCATION_PREFIXES')

State = dict[str, Any]


def capture() -> State:
  """The current configuration. Bindings may change afterwards without changing the result."""
  state: State = {name: _copied(getattr(gin_config, name)) for name in _STORES}
  return state | {'locked': gin_config.config_is_locked()}


def put_back(state: State) -> None:
  """Makes a configuration of `capture` the current one."""
  for name in _STORES:
    store = getattr(gin_config, name)
    store.clear()
    fill = store.extend if isinstance(store, list) else store.update
    fill(_copied(state[name]))
  gin_config._set_config_is_locked(state['locked'])


@contextlib.contextmanager
def preserved() -> Generator[None]:
  """At the end of the block, also after an error, gin's configuration is as it was before."""
  before = capture()
  try:
    yield
  finally:
    put_back(before)


def _copied(store: Any) -> Any:
  """A copy in which the bindings of each configurable are copied too."""
  if isinstance(store, dict):
    return {key: dict(x) if isinstance(x, dict) else x for key, x in store.items()}
  return type(store)(store)
