"""Results as a JSON file, with their provenance: command, time and versions."""

import contextlib
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

from het_plugin import weights

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'seqio', 'tensorflow', 'numpy')


def provenance(program: str) -> dict[str, Any]:
  """What a reader needs to reproduce a result of `python -m PROGRAM` in this process.

  Returns:
    'command', the command line; 'created', date and time with the time zone; 'versions', {package:
    version}.
  """
  versions = {'python': platform.python_version()}
  for name in _PACKAGES:
    # One may not be here, or be another distribution, such as tensorflow-cpu.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return {
    'command': shlex.join(['python', '-m', program, *sys.argv[1:]]),
    'created': datetime.datetime.now().astimezone().isoformat(sep=' ', timespec='minutes'),
    'versions': versions,
  }


def write_json(rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], path: str | Path) -> None:
  """Writes `rows` as JSON, NaN and infinities as null; makes the directory."""
  text = json.dumps(_plain(rows), indent=2, allow_nan=False) + '\n'
  with weights.replacing(path) as unfinished:
    unfinished.write_text(text)


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
