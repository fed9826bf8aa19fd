"""What a plan is asked for."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Request:
  """What to compile.

  Attributes:
    gin_files, gin_bindings, gin_search_paths: the configuration, as training takes it.
    topology: see `topology.parse`.
    mesh: (data, model) or (replica, data, model); None for what the configuration says.
    num_slices: TPU slices.
    steps: 'train', 'eval' or both.
  """

  gin_files: Sequence[str]
  gin_bindings: Sequence[str]
  gin_search_paths: Sequence[str]
  topology: str
  mesh: Sequence[int] | None = None
  num_slices: int = 1
  steps: Sequence[str] = ('train', 'eval')
