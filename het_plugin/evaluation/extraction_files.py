"""Where the representations of a data set lie, and how an interrupted extraction goes on.

    OUTPUT_DIR/DATASET/LAYER/SPLIT.safetensors    complete, with the settings that made it
    OUTPUT_DIR/DATASET/.unfinished.SPLIT/         rows of all layers so far: a .npy file per column,
                                                  and progress.json, which counts the complete rows

progress.json is replaced as a whole after the rows that it counts are on disk; rows behind them are
computed again. Settings are JSON values: all that the features depend on. Files of other settings
are never mixed in, and are replaced only if that is asked for.
"""

import dataclasses
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.lib.format import open_memmap

from het_plugin.evaluation import array_files, extraction
from het_plugin.evaluation.representations import (
  Representations,
  read_provenance,
  write_representations,
)
from het_plugin.training import processes, run_files

Settings = Mapping[str, Any]
_SHOWN = 40  # characters of a setting in an error
_COMMIT_SECONDS = 10.0  # of work that a kill may lose; an exception loses none


@dataclasses.dataclass(frozen=True)
class SplitFiles:
  """The files of a split in `folder`, OUTPUT_DIR/DATASET; suffix '.safetensors' or '.npz'."""

  folder: Path
  split: str
  suffix: str

  def path(self, layer: str) -> Path:
    return self.folder / safe_name(layer) / f'{safe_name(self.split)}{self.suffix}'

  @property
  def unfinished(self) -> Path:
    return self.folder / f'.unfinished.{safe_name(self.split)}'

  @property
  def progress(self) -> Path:
    return self.unfinished / 'progress.json'


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is left to do for a split.

  Attributes:
    files: of the split.
    settings: of all layers.
    num_examples: rows to write at most, the first of the stream.
    layers: those to write: the ones without a complete file, and the others of unfinished rows.
    num_rows: that are there already.
    state: of the input behind these rows; None before the first.
  """

  files: SplitFiles
  settings: Settings
  num_examples: int
  layers: tuple[str, ...]
  num_rows: int = 0
  state: Mapping[str, int] | None = None


def make_plan(
  files: SplitFiles,
  settings: Settings,
  num_examples: int,
  layers: Sequence[str],
  overwrite: bool = False,
) -> Plan:
  """Looks at what is there, in process 0, and changes nothing; every process calls this.

  Raises:
    ValueError: there is something of other settings, and `overwrite` is False.
  """

  def look() -> str:
    pending = []
    for layer in layers:
      path = files.path(layer)
      if not path.exists() or _differs(
        path, read_provenance(path), {**settings, 'layer': layer}, overwrite
      ):
        pending.append(layer)
    found = {'layers': pending}
    if pending and files.progress.exists():
      progress = run_files.read_json(files.progress)
      if progress is None or not {'settings', 'num_rows', 'state'} <= set(progress):
        raise ValueError(f'{files.progress} is no record of progress: remove its folder')
      # A kill between the files of two layers leaves rows that also hold the first layer.
      begun = progress['settings']['layers']
      wanted = begun if set(pending) <= set(begun) <= set(layers) else pending
      given = {**settings, 'layers': wanted}
      if not _differs(files.unfinished, progress['settings'], given, overwrite):
        found = {'layers': wanted, 'num_rows': progress['num_rows'], 'state': progress['state']}
    return json.dumps(found)

  found = json.loads(processes.in_the_first(look))
  found['layers'] = tuple(found['layers'])
  return Plan(files, settings, num_examples, **found)


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

  Raises:
    ValueError: a feature is not finite, there is no example, or an example id occurs twice.
  """
  rows = None
  if jax.process_index() == 0:
    size = max(1, plan.num_examples)  # an empty file cannot be mapped
    shapes = {extraction.column(k): (extractor.dtype, (size, widths[k])) for k in plan.layers}
    max_labels = batches.element_spec['label'].shape[1]
    shapes |= {'label': (np.int32, (size, max_labels)), 'index': (np.int32, (size,))}
    rows = _Rows(plan, shapes)
  states = deque()  # behind each batch, as the extractor reads ahead of what it gives

  def recorded() -> Iterator[Mapping[str, np.ndarray]]:
    for batch in batches:
      states.append(batches.get_state())
      yield batch

  if plan.state is not None:
    batches.set_state(plan.state)
  left = plan.num_examples - plan.num_rows
  try:
    for part in extractor.rows(params, recorded(), batch_size, left) if left else ():
      for layer in plan.layers:
        extraction.check_finite(layer, part[extraction.column(layer)], part['index'])
      state = states.popleft()
      if rows is not None:
        rows.append(part, state)
      on_rows(len(part['index']))
  finally:
    if rows is not None:
      rows.commit()
  if rows is not None:
    rows.write_files(class_names, {**(provenance or {}), **plan.settings})


class _Rows:
  """The unfinished rows of a plan."""

  def __init__(self, plan: Plan, shapes: Mapping[str, tuple[Any, tuple[int, ...]]]):
    """Opens the columns, {name: (dtype, shape)}, or makes them where nothing is there yet."""
    self._plan = plan
    self._num_rows, self._state = plan.num_rows, plan.state
    folder = plan.files.unfinished
    if plan.state is None:
      shutil.rmtree(folder, ignore_errors=True)
      folder.mkdir(parents=True)
    self._columns = {}
    for name, (dtype, shape) in shapes.items():
      path = folder / f'{name}.npy'
      if plan.state is None:
        open_memmap(path, 'w+', dtype, shape).flush()
        if hasattr(os, 'posix_fallocate'):
          # Writing to a mapped file on a full disk kills the process, so take the space now.
          with path.open('r+b') as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
      with array_files.reading(str(path)):
        open_memmap(path, 'r')  # an error if it was cut short; 'r+' would lengthen it
        self._columns[name] = open_memmap(path, 'r+').view(dtype)  # .npy has no bfloat16
    self.commit()

  def append(self, part: extraction.Rows, state: Mapping[str, int]) -> None:
    """Adds rows {column: [n, ...]} and the input's state behind them; commits if it is time."""
    end = self._num_rows + len(part['index'])
    for name, column in self._columns.items():
      column[self._num_rows : end] = part[name]
    self._num_rows, self._state = end, state
    if time.monotonic() >= self._committed + _COMMIT_SECONDS:
      self.commit()

  def commit(self) -> None:
    """Puts all rows on disk, then the record of them."""
    for column in self._columns.values():
      column.flush()
    settings = {**self._plan.settings, 'layers': list(self._plan.layers)}
    record = {'settings': settings, 'num_rows': self._num_rows, 'state': self._state}
    run_files.write_json(self._plan.files.progress, record)
    self._committed = time.monotonic()

  def write_files(self, class_names: tuple[str, ...] | None, provenance: Settings) -> None:
    """Writes a file per layer of the complete rows, which are then removed.

    Rows that come in another order than that of their ids are put in order in memory.
    """
    files = self._plan.files
    whole = {name: column[: self._num_rows] for name, column in self._columns.items()}
    try:
      order = extraction.order_by_id(whole['index'])
    except ValueError:  # such rows never become a file
      shutil.rmtree(files.unfinished)
      raise
    if (order == np.arange(len(order))).all():
      order = slice(None)
    for layer in self._plan.layers:
      features = whole[extraction.column(layer)]
      num_examples, dim = features.shape
      about = {'layer': layer, 'num_examples': num_examples, 'dim': dim}
      representations = Representations(
        *(features[order], whole['label'][order], whole['index'][order]),
        class_names,
        {**provenance, **about},
      )
      write_representations(files.path(layer), representations)
    shutil.rmtree(files.unfinished)


def safe_name(name: str) -> str:
  """A file name for a layer or a split; harmless characters stay.

  Slices stay readable and distinct: 'train[:50%]' is 'train_..50pct', 'train[50:]' 'train_50..'.
  """
  readable = name.replace('[', '_').replace(']', '').replace(':', '..').replace('%', 'pct')
  return re.sub(r'[^\w.+-]', '_', readable)


def _differs(path: Path, found: Settings, wanted: Settings, overwrite: bool) -> bool:
  """Whether the settings of a file are not those wanted.

  Raises:
    ValueError: they are not, and the file must not be overwritten. The message has both values of
      what differs, unless they are long.
  """
  different = [name for name, value in wanted.items() if found.get(name) != value]
  if different and not overwrite:
    shown = [
      name
      if max(len(str(found.get(name))), len(str(wanted[name]))) > _SHOWN
      else f'{name} {found.get(name)}, now {wanted[name]}'
      for name in different
    ]
    raise ValueError(
      f'{path} was made with other settings ({"; ".join(shown)}): give another --output_dir, or '
      '--overwrite to replace it'
    )
  return bool(different)
