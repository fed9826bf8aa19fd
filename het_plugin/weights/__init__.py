"""Reads and writes published weights; `layouts` and `towers` list the supported projects."""

from typing import TYPE_CHECKING

from het_plugin.system import faces
from het_plugin.weights.files import is_weights_file, read_arrays, write_arrays
from het_plugin.weights.hub import local
from het_plugin.weights.towers import (
  is_tower,
  not_recognised,
  read_config,
  read_text_tower,
  read_tower,
  tower_bindings,
)
from het_plugin.weights.transfer import (
  HEADS,
  INIT,
  LoadReport,
  export_params,
  load_params,
  saved_sizes,
  unstacked,
)

if TYPE_CHECKING:
  from het_plugin.weights import files, programs

__all__ = [
  'HEADS',
  'INIT',
  'LoadReport',
  'export_params',
  'is_tower',
  'is_weights_file',
  'load_params',
  'local',
  'not_recognised',
  'read_arrays',
  'read_config',
  'read_text_tower',
  'read_tower',
  'saved_sizes',
  'tower_bindings',
  'unstacked',
  'write_arrays',
]
__getattr__, _ = faces.on_first_use(__name__)
