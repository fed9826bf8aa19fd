"""Where the representations of a data set lie, and what of them is there already.

    OUTPUT_DIR/DATASET/LAYER/SPLIT.safetensors    complete, with the settings that made it
    OUTPUT_DIR/DATASET/.unfinished.SPLIT/         rows of all layers so far (row_store.py)

Settings are JSON-able and say all that the features depend on. Files of other settings are never
mixed with, nor replaced unless that is asked for.
"""

import dataclasses
import pickle
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from het_plugin.evaluation import extraction, row_store
from het_plugin.evaluation.representations import (
  Representations,
  read_provenance,
  write_representations,
)

Settings = Mapping[str, Any]
_SHOWN = 40  # characters of a setting in an error


@dataclasses.dataclass(frozen=True)
class SplitFiles:
  """The files of a split.

  Attributes:
    folder: OUTPUT_DIR/DATASET.
    split: its name.
    suffix: '.safetensors' or '.npz'.
  """

  folder: Path
  split: str
  suffix: str

  def path(self, layer: str) -> Path:
    return self.folder / safe_name(layer) / f'{safe_name(self.split)}{self.suffix}'

  @property
  def unfinished(self) -> Path:
    return self.folder / f'.unfinished.{safe_name(self.split)}'


@dataclasses.dataclass(frozen=True)
class Plan:
  """What there is to do for a split.

  Attributes:
    layers: those without a complete file.
    progress: of the unfinished rows, which hold these layers; None where there are none.
  """

  layers: tuple[str, ...]
  progress: row_store.Progress | None


def make_plan(
  files: SplitFiles, layers: Sequence[str], settings: Settings, overwrite: bool = False
) -> Plan:
  """Looks at what is there; changes nothing.

  Args:
    files: of the split.
    layers: those wanted.
    settings: of all layers.
    overwrite: whether what has other settings is to be replaced.

  Raises:
    ValueError: there is something of other settings, and no `overwrite`.
  """
  pending = []
  for layer in layers:
    path = files.path(layer)
    wanted = {**settings, 'layer': layer}
    changes = _changes(read_provenance(path), wanted) if path.exists() else None
    if changes and not overwrite:
      raise _other_settings(path, changes)
    if changes != []:
      pending.append(layer)
  progress = row_store.read_progress(files.unfinished) if pending else None
  if progress is None:
    return Plan(tuple(pending), None)
  # Files are written one after the other, so complete rows may hold layers that have theirs.
  begun = list(progress.settings['layers'])
  wanted = begun if progress.done and set(pending) <= set(begun) else pending
  changes = _changes(progress.settings, {**settings, 'layers': wanted})
  if changes and not overwrite:
    raise _other_settings(files.unfinished, changes)
  return Plan(tuple(pending), None if changes else progress)


def run_plan(
  files: SplitFiles,
  plan: Plan,
  settings: Settings,
  extractor: extraction.RepresentationExtractor,
  params: Any,
  batches: Any,
  *,
  batch_size: int,
  widths: Mapping[str, int],
  max_examples: int | None = None,
  class_names: tuple[str, ...] | None = None,
  provenance: Settings | None = None,
  on_rows: Callable[[int], None] = lambda number: None,
  commit_seconds: float = 10.0,
) -> None:
  """Computes the layers of a plan and writes their files. Killed at any moment, a new plan goes on
  behind the last rows committed.

  Every process calls it; process 0 is the one that writes.

  Args:
    files, plan, settings: as in and from `make_plan`.
    extractor: of the plan's layers.
    params, batch_size: as in `RepresentationExtractor.chunks`.
    batches: a data.BatchIterator of the split, at its start.
    widths: D of each layer.
    max_examples: uses the first so many examples of the stream.
    class_names: of the task.
    provenance: what the files are to say beside the settings.
    on_rows: told the number of rows of each batch.
    commit_seconds: work that may be lost where this process is killed; an exception loses none.

  Raises:
    ValueError: a feature is not finite, there is no example, or an example id comes twice.
  """
  progress = plan.progress
  store = None
  if jax.process_index() == 0:
    if progress is None:
      shutil.rmtree(files.unfinished, ignore_errors=True)
    columns = extraction.columns(
      {layer: widths[layer] for layer in plan.layers},
      extractor.dtype,
      batches.element_spec['label'].shape[1],
    )
    new = row_store.Progress({**settings, 'layers': list(plan.layers)}, columns)
    store = row_store.RowStore(files.unfinished, progress or new, commit_seconds)

  def append(rows: row_store.Rows, state: Mapping[str, int]) -> None:
    if store is not None:
      store.append(rows, state)
    on_rows(len(rows['index']))

  try:
    if progress is None or not progress.done:
      if progress is not None:
        max_examples = None if max_examples is None else max_examples - progress.num_rows
        if progress.state is not None:
          batches.set_state(progress.state)
      extraction.extract_to(append, extractor, params, batches, batch_size, max_examples)
      if store is not None:
        store.finish()
  finally:
    if store is not None:
      store.close()
  if store is not None:
    _write_files(files, plan, store, class_names, {**(provenance or {}), **settings})


def _write_files(
  files: SplitFiles,
  plan: Plan,
  store: row_store.RowStore,
  class_names: tuple[str, ...] | None,
  provenance: Settings,
) -> None:
  """A file for each layer of the complete rows, which are then removed.

  Rows that come in another order than that of their ids are put into order in memory.
  """
  rows = store.read()
  try:
    order = extraction.order_by_id(rows['index'])
  except ValueError:  # such rows never become a file
    store.remove()
    raise
  if (order == np.arange(len(order))).all():
    order = slice(None)
  for layer in plan.layers:
    features = rows[extraction.feature_column(layer)]
    num_examples, dim = features.shape
    representations = Representations(
      features[order],
      rows['label'][order],
      rows['index'][order],
      class_names,
      {**provenance, 'layer': layer, 'num_examples': num_examples, 'dim': dim},
    )
    write_representations(files.path(layer), representations)
  store.remove()


def safe_name(name: str) -> str:
  """A file name for a layer or a split, the same characters where they are harmless.

  Slices stay readable and apart: 'train[:50%]' is 'train_..50pct', 'train[50:]' 'train_50..'.
  """
  readable = name.replace('[', '_').replace(']', '').replace(':', '..').replace('%', 'pct')
  return re.sub(r'[^\w.+-]', '_', readable)


def from_process_0(compute: Callable[[], Any]) -> Any:
  """What process 0 computes, on every process; and its ValueError."""
  if jax.process_count() == 1:
    return compute()
  answer = (None, None)
  if jax.process_index() == 0:
    try:
      answer = (compute(), None)
    except ValueError as error:
      answer = (None, str(error))
  sent = np.frombuffer(pickle.dumps(answer), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(sent))))
  buffer = np.resize(sent, size)  # only that of process 0 counts
  value, error = pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes())
  if error is not None:
    raise ValueError(error)
  return value


def _changes(found: Settings, wanted: Settings) -> list[str]:
  return [
    _change(name, found.get(name), value)
    for name, value in wanted.items()
    if found.get(name) != value
  ]


def _change(name: str, found: Any, wanted: Any) -> str:
  if max(len(str(found)), len(str(wanted))) > _SHOWN:
    return name
  return f'{name} {found}, now {wanted}'


def _other_settings(path: Path, changes: Sequence[str]) -> ValueError:
  return ValueError(
    f'{path} was made with other settings ({"; ".join(changes)}): give another --output_dir, or '
    '--overwrite to replace it'
  )
