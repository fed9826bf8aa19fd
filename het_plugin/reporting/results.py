"""Results as a JSON file, with their provenance: command, time and versions."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
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
  """Writes `rows` as JSON, NaN and infinities as null; makes the directory.

  The entries of sequences are taken one after the other, so that they need not be in memory.
  """
  with weights.replacing(path) as unfinished, unfinished.open('w') as stream:
    stream.writelines(_json(rows))
    stream.write('\n')


def _json(value: Any, indent: str = '\n') -> Iterator[str]:
  """Pieces of the text of a value, whose lines begin with `indent`."""
  if isinstance(value, np.generic | np.ndarray):
    value = value.tolist()
  inner, entries = f'{indent}  ', None
  if isinstance(value, Mapping):
    brackets, entries = '{}', ((f'{json.dumps(str(name))}: ', x) for name, x in value.items())
  elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
    brackets, entries = '[]', (('', x) for x in value)
  elif isinstance(value, float) and not math.isfinite(value):
    value = None
  if entries is None:
    yield json.dumps(value)
    return
  before = brackets[0]
  for name, x in entries:
    yield f'{before}{inner}{name}'
    yield from _json(x, inner)
    before = ','
  yield brackets if before != ',' else f'{indent}{brackets[1]}'
