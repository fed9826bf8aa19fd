"""Files of the representations of a data set, written so that an interrupted start goes on.

    OUTPUT_DIR/DATASET/LAYER/SPLIT.safetensors    complete, with its settings; of several processes
                                                  SPLIT-00000-of-00002.safetensors and so on
    OUTPUT_DIR/DATASET/.unfinished.SPLIT/         settings.json, and rows of all layers so far
    OUTPUT_DIR/DATASET/.lock.SPLIT                while a program writes the split

Every process writes the rows that it computes, in POSITION.ROWS.OWN.PROCESS-of-PROCESSES.npz:
their end in the split, the number of rows up to there, and that of rows in the file. All write at
the same positions, and a later start goes on from the last one where none is missing. It may have
more processes or fewer.

Files of other settings are never mixed in, and are replaced only on request.
"""

import contextlib
import dataclasses
import functools
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

_NUMBER = '[0-9]' * 5
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
    """Where one process writes a layer."""
    return self.folder / safe_name(layer) / f'{safe_name(self.split)}{self.suffix}'

  def written(self, layer: str) -> list[Path]:
    """The files of a complete layer: one, or shards of processes. Else there is none."""
    path = self.path(layer)
    if path.exists():
      return [path]
    found = self._shards_of(layer)
    return found if found and len(found) == int(found[0].stem.rpartition('-')[2]) else []

  def source(self, layer: str) -> str:
    """A complete layer as `rows.read` takes it."""
    first, *others = self.written(layer)
    return str(first).replace('-00000-of-', '-*-of-') if others else str(first)

  def _shards_of(self, layer: str) -> list[Path]:
    path = self.path(layer)
    return sorted(path.parent.glob(f'{path.stem}-{_NUMBER}-of-{_NUMBER}{path.suffix}'))

  @property
  def unfinished(self) -> Path:
    return self.folder / f'.unfinished.{safe_name(self.split)}'

  def parts(self) -> list['_Part']:
    """Rows so far, ascending by position, then by process."""
    return sorted(map(_Part.of, self.unfinished.glob('[0-9]*.npz')))

  def pending(self, layers: Sequence[str], overwrite: bool = False) -> Pending:
    """The work that is left; collective. Process 0 reads the files; nothing is changed.

    Files of other settings are a ValueError, unless `overwrite`.
    """

    def look() -> str:
      missing = tuple(
        layer
        for layer in layers
        if not (paths := self.written(layer))
        or self._differs(paths[0], files.read_provenance(paths[0]), overwrite)
      )
      made_with = run_files.read_json(self.unfinished / 'settings.json')
      last = _last_of_all(self.parts()) if missing else None
      found = Pending(missing)
      if last and made_with and not self._differs(self.unfinished, made_with, overwrite):
        with files.reading(str(last.path)), np.load(last.path) as rows:
          if {rows_lib.column(x) for x in missing} <= set(rows):
            found = Pending(missing, last.position, last.num_rows)
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
    """Computes the pending layers, and writes their files. Every process calls this.

    Call it inside `held`.

    Args:
      pending: the result of `pending`.
      run, batches, batch_size, pool: as in `Run.stream`; batches is a `data.BatchIterator`.
      num_examples: largest number of rows to write, from the start of the stream.
      class_names, provenance: written to the files beside the settings.
      on_rows: called with the number of rows of each batch.

    Raises:
      ValueError: a row is not finite, or the processes do not share the folder.
    """
    dtype = jax.numpy.dtype(self.settings['dtype'])
    columns = [rows_lib.column(layer) for layer in pending.layers]
    compute = run.computing(columns, pool=pool, dtype=dtype, is_shared=True)
    self._begin(pending.position)
    position = pending.position
    num_rows = pending.num_rows
    batches_of: list[dict[str, np.ndarray]] = []  # since the last file
    wrong = ''
    begun = time.monotonic()
    num_batches = 0  # since then
    planned = 1

    def write() -> None:
      if batches_of and not wrong:
        arrays = {x: np.concatenate([rows[x] for rows in batches_of]) for x in batches_of[0]}
        process = f'{jax.process_index():05}-of-{jax.process_count():05}'
        path = self.unfinished / f'{position:012}.{num_rows}.{len(arrays["index"])}.{process}.npz'
        with run_files.replacing(path) as unfinished, unfinished.open('wb') as file:
          # The stub takes each array for `allow_pickle`, the only keyword that it names.
          np.savez(file, **arrays)  # ty: ignore[invalid-argument-type]
      batches_of.clear()

    batches.set_state({'position': position})
    left = num_examples - num_rows
    shares = compute.shares(run.params, batches, batch_size, left) if left else ()
    try:
      # A signal waits for the rows at hand to be written; with none it ends the program at once.
      with stopping.handled(lambda: bool(batches_of), lambda: None):
        for rows, number in shares:
          for layer, column in zip(pending.layers, columns, strict=True):
            found = not_finite(layer, rows[column], rows['index'])
            if found and jax.process_count() == 1:
              raise ValueError(found)
            wrong = wrong or found  # the others hear of it at the next file
          batches_of.append(rows)
          position = position + batch_size
          num_rows = num_rows + number
          on_rows(number)
          if stopping.reached():
            raise exit_codes.Preempted(num_rows)
          num_batches += 1
          if num_batches == planned:
            _raise_together(wrong)
            write()
            each = (time.monotonic() - begun) / num_batches
            # All write at the same positions, by the clock of one.
            more = min(4 * planned, round(_COMMIT_SECONDS / max(each, 1e-6)))
            planned = max(1, int(processes.in_the_first(functools.partial(str, more))))
            num_batches = 0
            begun = time.monotonic()
      _raise_together(wrong)
    finally:
      write()
    self._write(pending.layers, dtype, num_rows, class_names, provenance or {})

  def _begin(self, position: int) -> None:
    """Makes the folder of rows so far, without those after a position; collective."""

    def clear() -> None:
      if not position:
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True)
        run_files.write_json(self.unfinished / 'settings.json', dict(self.settings))
      for part in self.parts():
        if part.position > position:
          part.path.unlink()

    processes.in_the_first(clear)
    is_there = (self.unfinished / 'settings.json').exists()
    _raise_together('' if is_there else f'{self.folder} must be a folder that all processes share')

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
    try:
      is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
      is_there = False
    if has_lock and not is_there:
      return self._lock(stack)  # the other program has just ended and taken its file away
    stack.callback(path.unlink, missing_ok=True)

  def _write(self, layers, dtype, num_rows, class_names, provenance) -> None:
    """Writes the files of each layer, one layer in memory at a time, and deletes the rows so far.

    Every process writes a shard, unless there are too few rows for that.
    """
    processes.meet()  # all rows are there
    parts = [part for part in self.parts() if part.own]
    found = sum(part.own for part in parts)
    wrong = ''
    if found != num_rows:
      wrong = f'{self.unfinished} has {found} of {num_rows} rows: another program has changed it'
      wrong += '. Start again'
    number = jax.process_index()
    num_shards = max(1, min(jax.process_count(), len(parts)))
    for layer in layers:
      rows = None
      if number < num_shards and not wrong:
        try:
          rows = rows_lib.ordered(_read_parts(parts[number::num_shards], layer, dtype))
        except ValueError as error:
          wrong = str(error)
      if said := processes.gather(wrong):  # these rows can never become a file
        processes.in_the_first(lambda: shutil.rmtree(self.unfinished))
        raise ValueError(processes.as_one(said))
      path = self.path(layer)
      paths = [path]
      if num_shards > 1:
        of_shards = f'-of-{num_shards:05}{path.suffix}'
        paths = [path.with_name(f'{path.stem}-{i:05}{of_shards}') for i in range(num_shards)]
      processes.in_the_first(functools.partial(self._remove_others, layer, paths))
      if rows is not None:
        about = {'layer': layer, 'num_examples': num_rows, 'dim': rows.features.shape[1]}
        about = {**provenance, **self.settings, **about}
        rows = dataclasses.replace(rows, class_names=class_names, provenance=about)
        files.write(paths[number], rows)
    processes.meet()
    processes.in_the_first(lambda: shutil.rmtree(self.unfinished))

  def _remove_others(self, layer: str, paths: Sequence[Path]) -> None:
    """Removes the files of a layer that some of other names will replace."""
    for path in {self.path(layer), *self._shards_of(layer)} - {*paths}:
      path.unlink(missing_ok=True)


class _Part(NamedTuple):
  """A file of rows so far, see the top."""

  position: int
  num_rows: int
  process: int
  num_processes: int
  own: int
  path: Path

  @classmethod
  def of(cls, path: Path) -> '_Part':
    position, num_rows, own, process, _, num_processes = re.split('[.-]', path.stem)
    return cls(*map(int, (position, num_rows, process, num_processes, own)), path)


def _last_of_all(parts: Sequence[_Part]) -> _Part | None:
  """A part at the last position that all processes of a start have reached."""
  for part in reversed(parts):
    if sum(x[:2] == part[:2] for x in parts) == part.num_processes:
      return part
  return None


def _read_parts(parts: Sequence[_Part], layer: str, dtype: Any) -> list[rows_lib.Rows]:
  """Rows with a layer as features."""
  column = rows_lib.column(layer)
  read = []
  for part in parts:
    with np.load(part.path) as arrays:
      found = {x: arrays[x] for x in arrays if not x.startswith('features') or x == column}
    found['features'] = found.pop(column).view(dtype)  # .npz has no bfloat16
    read.append(rows_lib.of_batch(found))
  return read


def _raise_together(wrong: str) -> None:
  """Raises ValueError on all processes if there is a text on one."""
  if said := processes.gather(wrong):
    raise ValueError(processes.as_one(said))


def _shown(name: str, before: Any, now: Any) -> str:
  """How an error names a setting that differs; '' if it changes no representation."""
  if name == 'config' and isinstance(before, str):
    found = (x for x in changes.changes(before, now) if x.key not in opening.MESH)
    return '; '.join(dict.fromkeys(map(str, found)))
  is_long = max(len(str(before)), len(str(now))) > _SHOWN
  return name if is_long else f'{name} {before}, now {now}'


def not_finite(layer: str, features: np.ndarray, index: np.ndarray) -> str:
  """Says which row of features [n, D] holds an infinity or a NaN; '' if none does."""
  finite = np.isfinite(features).all(axis=1)
  if finite.all():
    return ''
  hint = ', which float16 may be too narrow for' if features.dtype == np.float16 else ''
  example = int(index[~finite][0])
  return f'layer {layer!r} of example {example} is not finite in {features.dtype.name}{hint}'


def safe_name(name: str) -> str:
  """A file name for a layer or a split; safe characters stay.

  Slices stay readable and distinct: 'train[:50%]' is 'train_..50pct', 'train[50:]' 'train_50..'.
  """
  readable = name.replace('[', '_').replace(']', '').replace(':', '..').replace('%', 'pct')
  return re.sub(r'[^\w.+-]', '_', readable)
