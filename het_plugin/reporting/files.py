"""Results as a JSON file."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


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
