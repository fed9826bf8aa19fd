"""Where the representations of a data set lie, and how an interrupted extraction goes on.

    OUTPUT_DIR/DATASET/LAYER/SPLIT.safetensors    complete, with the settings that made it
    OUTPUT_DIR/DATASET/.unfinished.SPLIT/         rows of all layers so far (row_store.py)

Settings are JSON values: all that the features depend on. Files of other settings are never mixed
in, and are replaced only if that is asked for.
"""

import dataclasses
import pickle
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
  """What is left to do for a split.

  Attributes:
    files: of the split.
    settings: of all layers.
    num_examples: rows to write at most, the first of the stream.
    layers: those to write: the ones without a complete file, and the others of unfinished rows.
    progress: of the unfinished rows, which hold these layers; None if there are none.
  """

  files: SplitFiles
  settings: Settings
  num_examples: int
  layers: tuple[str, ...]
  progress: row_store.Progress | None


def make_plan(
  files: SplitFiles,
  settings: Settings,
  num_examples: int,
  layers: Sequence[str],
  overwrite: bool = False,
) -> Plan:
  """Looks at what is there; changes nothing.

  Args:
    files, settings, num_examples: see `Plan`.
    layers: the layers wanted.
    overwrite: whether to replace what has other settings.

  Raises:
    ValueError: there is something of other settings, and `overwrite` is False.
  """
  pending = []
  for layer in layers:
    path = files.path(layer)
    if path.exists():
      changes = _changes(read_provenance(path), {**settings, 'layer': layer})
      if not changes:
        continue
      _refuse(path, changes, overwrite)
    pending.append(layer)
  progress = row_store.read_progress(files.unfinished) if pending else None
  if progress is not None:
    # A kill between the files of two layers leaves rows that also hold the first layer.
    begun = list(progress.settings['layers'])
    wanted = begun if set(pending) <= set(begun) <= set(layers) else pending
    if changes := _changes(progress.settings, {**settings, 'layers': wanted}):
      _refuse(files.unfinished, changes, overwrite)
      progress = None
    else:
      pending = wanted
  return Plan(files, settings, num_examples, tuple(pending), progress)


def run_plan(
  plan: Plan,
  extractor: extraction.RepresentationExtractor,
  params: Any,
  batches: Any,
  batch_size: int,
  widths: Mapping[str, int],
  *,
  class_names: tuple[str, ...] | None = None,
  provenance: Settings | None = None,
  on_rows: Callable[[int], None] = lambda number: None,
  commit_seconds: float = 10.0,
) -> None:
  """Computes the layers of a plan and writes their files.

  After a kill at any moment a new plan goes on behind the last rows committed. Every process calls
  this; process 0 writes.

  Args:
    plan: of `make_plan`.
    extractor: of the plan's layers.
    params, batch_size: as in `RepresentationExtractor.rows`.
    batches: a data.BatchIterator of the split, at its start.
    widths: D of each layer.
    class_names: of the task.
    provenance: what the files say beside the settings.
    on_rows: is called with the number of rows of each batch.
    commit_seconds: work that a kill may lose; an exception loses none.

  Raises:
    ValueError: a feature is not finite, there is no example, or an example id occurs twice.
  """
  store = None
  if jax.process_index() == 0:
    store = _open_store(plan, batches, widths, str(extractor.dtype), commit_seconds)
  states = deque()  # behind each batch, as the extractor reads ahead of what it gives

  def recorded() -> Iterator[Mapping[str, np.ndarray]]:
    for batch in batches:
      states.append(batches.get_state())
      yield batch

  left = plan.num_examples
  if plan.progress is not None and plan.progress.state is not None:
    batches.set_state(plan.progress.state)
    left -= plan.progress.num_rows
  try:
    for rows in extractor.rows(params, recorded(), batch_size, left) if left else ():
      for layer in plan.layers:
        extraction.check_finite(layer, rows[extraction.column(layer)], rows['index'])
      state = states.popleft()
      if store is not None:
        store.append(rows, state)
      on_rows(len(rows['index']))
  finally:
    if store is not None:
      store.commit()
  if store is not None:
    _write_files(plan, store, class_names, {**(provenance or {}), **plan.settings})


def _open_store(plan, batches, widths, dtype: str, commit_seconds: float) -> row_store.RowStore:
  """The unfinished rows of a plan, or an empty store for them."""
  if plan.progress is not None:
    return row_store.RowStore(plan.files.unfinished, plan.progress, commit_seconds)
  shutil.rmtree(plan.files.unfinished, ignore_errors=True)
  rows = max(1, plan.num_examples)  # an empty file cannot be mapped
  max_labels = batches.element_spec['label'].shape[1]
  columns = {'label': ('int32', (rows, max_labels)), 'index': ('int32', (rows,))}
  columns |= {extraction.column(k): (dtype, (rows, widths[k])) for k in plan.layers}
  new = row_store.Progress({**plan.settings, 'layers': list(plan.layers)}, columns)
  return row_store.RowStore(plan.files.unfinished, new, commit_seconds)


def _write_files(plan: Plan, store: row_store.RowStore, class_names, provenance: Settings) -> None:
  """Writes a file per layer of the complete rows, which are then removed.

  Rows that come in another order than that of their ids are put in order in memory.
  """
  rows = store.rows()
  try:
    order = extraction.order_by_id(rows['index'])
  except ValueError:  # such rows never become a file
    shutil.rmtree(plan.files.unfinished)
    raise
  if (order == np.arange(len(order))).all():
    order = slice(None)
  for layer in plan.layers:
    features = rows[extraction.column(layer)]
    num_examples, dim = features.shape
    representations = Representations(
      features[order],
      rows['label'][order],
      rows['index'][order],
      class_names,
      {**provenance, 'layer': layer, 'num_examples': num_examples, 'dim': dim},
    )
    write_representations(plan.files.path(layer), representations)
  shutil.rmtree(plan.files.unfinished)


def safe_name(name: str) -> str:
  """A file name for a layer or a split; harmless characters stay.

  Slices stay readable and distinct: 'train[:50%]' is 'train_..50pct', 'train[50:]' 'train_50..'.
  """
  readable = name.replace('[', '_').replace(']', '').replace(':', '..').replace('%', 'pct')
  return re.sub(r'[^\w.+-]', '_', readable)


def from_process_0(compute: Callable[[], Any]) -> Any:
  """What process 0 computes, on every process; a ValueError or OSError there is raised on all."""
  if jax.process_count() == 1:
    return compute()
  answer = (None, None)
  if jax.process_index() == 0:
    try:
      answer = (compute(), None)
    except (ValueError, OSError) as error:
      answer = (None, str(error))
  sent = np.frombuffer(pickle.dumps(answer), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(sent))))
  buffer = np.resize(sent, size)  # only the buffer of process 0 counts
  value, error = pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes())
  if error is not None:
    raise ValueError(error)
  return value


def _changes(found: Settings, wanted: Settings) -> list[str]:
  """What differs, with both values unless they are long."""
  different = [name for name, value in wanted.items() if found.get(name) != value]
  return [
    name
    if max(len(str(found.get(name))), len(str(wanted[name]))) > _SHOWN
    else f'{name} {found.get(name)}, now {wanted[name]}'
    for name in different
  ]


def _refuse(path: Path, changes: Sequence[str], overwrite: bool) -> None:
  if not overwrite:
    raise ValueError(
      f'{path} was made with other settings ({"; ".join(changes)}): give another --output_dir, or '
      '--overwrite to replace it'
    )
