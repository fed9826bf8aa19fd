"""Rows: named columns of the examples of a split, read from a file or computed by a run."""

from het_plugin.rows.files import read, read_provenance, write
from het_plugin.rows.labels import label_rows
from het_plugin.rows.rows import (
  Rows,
  check_features,
  check_names,
  column,
  concatenate,
  layer_of,
  of_batch,
  ordered,
  paired,
)
from het_plugin.rows.shards import Reordered

__all__ = [
  'Reordered',
  'Rows',
  'check_features',
  'check_names',
  'column',
  'concatenate',
  'label_rows',
  'layer_of',
  'of_batch',
  'ordered',
  'paired',
  'read',
  'read_provenance',
  'write',
]
