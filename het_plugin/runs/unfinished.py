"""Files of the representations of a data set, written so that an interrupted start goes on.

    OUTPUT_DIR/DATASET/LAYER/SPLIT.safetensors    complete, with its settings
    OUTPUT_DIR/DATASET/.unfinished.SPLIT/         settings.json, and rows of all layers so far:
                                                  POSITION.ROWS.npz, named by their end in the
                                                  split and the number of rows up to there
    OUTPUT_DIR/DATASET/.lock.SPLIT                while a process writes the split

Files of other settings are never mixed in, and are replaced only on request.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from het_plugin import rows as rows_lib
from het_plugin.config import changes
from het_plugin.operations import lock
from het_plugin.rows import files
from het_plugin.runs import opening
from het_plugin.runs.run import Run
from het_plugin.system import exit_codes, processes, run_files, stopping

_SHOWN = 40  # characters of a setting in an error
_COMMIT_SECONDS = 30.0  # work that is lost if the process is killed; an exception loses none


class Pending(NamedTuple):
  """The layers that a split still needs, and the end of the rows that are already there."""

  layers: tuple[str, ...]
  position: int = 0  # in the stream of examples
  num_rows: int = 0


@dataclasses.dataclass(frozen=True)
class SplitFiles:
  """The files of a split."""

  folder: Path  # OUTPUT_DIR/DATASET
  split: str  # its name
  suffix: str  # '.safetensors' or '.npz'
  settings: Mapping[str, Any]  # JSON values: all that the features depend on, besides the layer

  def path(self, layer: str) -> Path:
    return self.folder / safe_name(layer) / f'{safe_name(self.split)}{self.suffix}'

  @property
  def unfinished(self) -> Path:
    return self.folder / f'.unfinished.{safe_name(self.split)}'

  def shards(self) -> list[Path]:
    return sorted(self.unfinished.glob('[0-9]*.npz'))

  def pending(self, layers: Sequence[str], overwrite: bool = False) -> Pending:
    """The work that is left; collective. Process 0 reads the files; nothing is changed.

    Files of other settings are a ValueError, unless `overwrite`.
    """

    def look() -> str:
      missing = tuple(
        layer
        for layer in layers
        if not (path := self.path(layer)).exists()
        or self._differs(path, files.read_provenance(path), overwrite)
      )
      made_with = run_files.read_json(self.unfinished / 'settings.json')
      shards = self.shards() if missing else []
      found = Pending(missing)
      if shards and made_with and not self._differs(self.unfinished, made_with, overwrite):
        with files.reading(str(shards[-1])), np.load(shards[-1]) as rows:
          if {rows_lib.column(x) for x in missing} <= set(rows):
            found = Pending(missing, *map(int, shards[-1].stem.split('.')))
      return json.dumps(found)

    layers, *rest = json.loads(processes.in_the_first(look))
    return Pending(tuple(layers), *rest)

  def _differs(self, path: Path, found: Mapping[str, Any], overwrite: bool) -> bool:
    """Whether a file has other settings; a ValueError with both unless it may be replaced."""
    different = [
      text
      for name, value in self.settings.items()
      if found.get(name) != value and (text := _shown(name, found.get(name), value))
    ]
    if different and not overwrite:
      raise ValueError(
        f'{path} was made with other settings ({"; ".join(different)}): give another '
        '--output_dir, or replace it with het_plugin.represent --overwrite'
      )
    return bool(different)

  def complete(
    self,
    pending: Pending,
    run: Run,
    batches: Any,
    batch_size: int,
    num_examples: int,
    *,
    pool: str = 'mean',
    class_names: tuple[str, ...] | None = None,
    provenance: Mapping[str, Any] | None = None,
    on_rows: Callable[[int], None] = lambda number: None,
  ) -> None:
    """Computes the pending layers; process 0 writes their files. Every process calls this.

    Call it inside `held`.

    Args:
      pending: the result of `pending`.
      run, batches, batch_size, pool: as in `Run.stream`; batches is a `data.BatchIterator`.
      num_examples: largest number of rows to write, from the start of the stream.
      class_names, provenance: written to the files beside the settings.
      on_rows: called with the number of rows of each batch.
    """
    dtype = jax.numpy.dtype(self.settings['dtype'])
    columns = [rows_lib.column(layer) for layer in pending.layers]
    compute = run.computing(columns, pool=pool, dtype=dtype)
    is_first = jax.process_index() == 0
    if is_first and not pending.position:
      shutil.rmtree(self.unfinished, ignore_errors=True)
      self.unfinished.mkdir(parents=True)
      run_files.write_json(self.unfinished / 'settings.json', dict(self.settings))
    position = pending.position
    num_rows = pending.num_rows
    parts = []
    written = time.monotonic()

    def commit() -> None:
      if is_first and parts:
        path = self.unfinished / f'{position:012}.{num_rows}.npz'
        with run_files.replacing(path) as unfinished, unfinished.open('wb') as file:
          arrays = {x: np.concatenate([part[x] for part in parts]) for x in parts[0]}
          # The stub takes each array for `allow_pickle`, the only keyword that it names.
          np.savez(file, **arrays)  # ty: ignore[invalid-argument-type]
      parts.clear()

    batches.set_state({'position': position})
    left = num_examples - num_rows
    try:
      # A signal waits for the rows at hand to be written; with none it ends the program at once.
      with stopping.handled(lambda: bool(parts), lambda: None):
        for rows in compute(run.params, batches, batch_size, left) if left else ():
          for layer, column in zip(pending.layers, columns, strict=True):
            check_finite(layer, rows[column], rows['index'])
          parts.append(rows)
          position = position + batch_size
          num_rows = num_rows + len(rows['index'])
          on_rows(len(rows['index']))
          if stopping.reached():
            raise exit_codes.Preempted(num_rows)
          if time.monotonic() >= written + _COMMIT_SECONDS:
            commit()
            written = time.monotonic()
    finally:
      commit()
    if is_first:
      self._write(pending.layers, dtype, num_rows, class_names, provenance or {})

  @contextlib.contextmanager
  def held(self) -> Generator[None]:
    """Keeps other programs from writing the split; collective.

    Process 0 holds a lock, which the kernel releases when it ends. ValueError if another has it.
    """
    with contextlib.ExitStack() as stack:
      processes.in_the_first(lambda: self._lock(stack))
      yield

  def _lock(self, stack: contextlib.ExitStack) -> None:
    self.folder.mkdir(parents=True, exist_ok=True)
    path = self.folder / f'.lock.{safe_name(self.split)}'
    file = stack.enter_context(run_files.open_lock(path))
    has_lock = lock.taken(file)
    if has_lock is False:
      raise ValueError(
        f'{self.folder} is in use: another program writes its split {self.split}; wait for its '
        'end, or give another --output_dir'
      )
    is_there = path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino
    if has_lock and not is_there:
      return self._lock(stack)  # the other program has just ended and taken its file away
    stack.callback(path.unlink, missing_ok=True)

  def _write(self, layers, dtype, num_rows, class_names, provenance) -> None:
    """Writes a file per layer, one layer in memory at a time, and deletes the shards."""
    for layer in layers:
      column = rows_lib.column(layer)
      parts = []
      for path in self.shards():
        with np.load(path) as shard:
          found = {x: shard[x] for x in shard if not x.startswith('features') or x == column}
        found['features'] = found.pop(column).view(dtype)  # .npz has no bfloat16
        parts.append(rows_lib.of_batch(found))
      try:
        rows = rows_lib.ordered(parts)
        if len(rows) != num_rows:
          raise ValueError(
            f'{self.unfinished} has {len(rows)} of {num_rows} rows: another program has changed '
            'it. Start again'
          )
      except ValueError:  # these rows can never become a file
        shutil.rmtree(self.unfinished)
        raise
      about = {'layer': layer, 'num_examples': len(rows), 'dim': rows.features.shape[1]}
      about = {**provenance, **self.settings, **about}
      rows = dataclasses.replace(rows, class_names=class_names, provenance=about)
      files.write(self.path(layer), rows)
    shutil.rmtree(self.unfinished)


def _shown(name: str, before: Any, now: Any) -> str:
  """How an error names a setting that differs; '' if it changes no representation."""
  if name == 'config' and isinstance(before, str):
    found = (x for x in changes.changes(before, now) if x.key not in opening.MESH)
    return '; '.join(dict.fromkeys(map(str, found)))
  is_long = max(len(str(before)), len(str(now))) > _SHOWN
  return name if is_long else f'{name} {before}, now {now}'


def check_finite(layer: str, features: np.ndarray, index: np.ndarray) -> None:
  """Raises ValueError if a row of features [n, D] holds an infinity or a NaN."""
  finite = np.isfinite(features).all(axis=1)
  if not finite.all():
    hint = ', which float16 may be too narrow for' if features.dtype == np.float16 else ''
    raise ValueError(
      f'layer {layer!r} of example {int(index[~finite][0])} is not finite in '
      f'{features.dtype.name}{hint}'
    )


def safe_name(name: str) -> str:
  """A file name for a layer or a split; safe characters stay.

  Slices stay readable and distinct: 'train[:50%]' is 'train_..50pct', 'train[50:]' 'train_50..'.
  """
  readable = name.replace('[', '_').replace(']', '').replace(':', '..').replace('%', 'pct')
  return re.sub(r'[^\w.+-]', '_', readable)
