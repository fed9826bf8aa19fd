"""Results as a JSON file, with their provenance: command, versions and configuration."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'seqio', 'tensorflow', 'numpy')


@dataclasses.dataclass(frozen=True)
class Provenance:
  """The information that a reader needs to reproduce a result."""

  command: str  # the command line
  created: str  # date and time with the time zone
  versions: Mapping[str, str]  # {package: version}
  # {name: text} of gin configurations, shown folded
  configs: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @classmethod
  def of_this_process(cls, module: str, configs: Mapping[str, str]) -> 'Provenance':
    """Provenance of `python -m MODULE` with this process's arguments, now."""
    versions = {'python': platform.python_version()}
    for name in _PACKAGES:
      # One may not be here, or be another distribution, such as tensorflow-cpu.
      with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions[name] = importlib.metadata.version(name)
    return cls(
      command=shlex.join(['python', '-m', module, *sys.argv[1:]]),
      created=datetime.datetime.now().astimezone().isoformat(sep=' ', timespec='minutes'),
      versions=versions,
      configs=configs,
    )


def write_json(rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], path: str | Path) -> None:
  """Writes `rows` as JSON, NaN and infinities as null; makes the directory."""
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(_plain(rows), indent=2, allow_nan=False) + '\n')


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, np.generic | np.ndarray):
    return _plain(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
