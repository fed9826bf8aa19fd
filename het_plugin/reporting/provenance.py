"""Where a result comes from: the command, the versions and the configuration that made it."""

import dataclasses
import datetime
import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Mapping

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'seqio', 'tensorflow', 'numpy')


@dataclasses.dataclass(frozen=True)
class Provenance:
  """What a reader needs to make the result again.

  Attributes:
    command: the command line.
    created: date and time with the time zone.
    versions: {package: version}.
    configs: {name: text} of gin configurations, shown folded.
  """

  command: str
  created: str
  versions: Mapping[str, str]
  configs: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @classmethod
  def of_this_process(cls, module: str, configs: Mapping[str, str]) -> 'Provenance':
    """Provenance of `python -m MODULE` with this process's arguments, now."""
    versions = {'python': platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    return cls(
      command=shlex.join(['python', '-m', module, *sys.argv[1:]]),
      created=datetime.datetime.now().astimezone().isoformat(sep=' ', timespec='minutes'),
      versions=versions,
      configs=configs,
    )
