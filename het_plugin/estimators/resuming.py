"""Searches that go on where a program was stopped.

A command makes the same searches in the same order each time it is run. Inside `kept` a folder has

    about.json     what the searches depend on
    000012.npz     the parameters that the search of this number found, or of the last one the best
                   so far

and the next run takes from it what is there.
"""

import contextlib
import contextvars
import dataclasses
import json
import shutil
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util
from sklearn.exceptions import ConvergenceWarning

import het_plugin
from het_plugin.estimators import inputs, lbfgs
from het_plugin.estimators.model import Model
from het_plugin.rows import Rows, files
from het_plugin.system import exit_codes, run_files, stopping

_SECONDS = 30.0  # work that is lost if the process is killed; an exception or a signal loses none
_ABOUT = 'about'  # the name of the file, and of an array that is no parameter
_num_made = 0


class _Search(NamedTuple):
  """The result of a search for the parameters of a model.

  Attributes:
    found: the best parameters so far.
    has_ended: whether these are the last ones.
    warned: texts of its `ConvergenceWarning`s.
    model: the text of the model.
  """

  found: lbfgs.FitResult
  has_ended: bool
  warned: list[str]
  model: str


@contextlib.contextmanager
def kept(folder: Path | None, settings: Any, rows: Rows) -> Generator[None]:
  """Inside, the results of `minimise` are kept in a folder; None keeps nothing.

  SIGTERM and Ctrl-C then end the program with exit code 42.

  Args:
    folder: is made when there is something to keep. `forget` removes it.
    settings, rows: a dataclass and rows that the searches depend on. What the folder has of others
      is left out, and then replaced.

  Raises:
    ValueError: the folder is there, and is not of this function.
  """
  if folder is None:
    yield
    return
  about = {'version': het_plugin.__version__, 'settings': dataclasses.asdict(settings)}
  searches = _Searches(folder, json.loads(json.dumps(about | _described(rows))))
  token = _current.set(searches)
  try:
    with stopping.handled(lambda: True, lambda: None):
      yield
  except BaseException:
    searches.write()
    raise
  finally:
    _current.reset(token)


def are_kept() -> bool:
  """Whether this is inside `kept`."""
  return _current.get() is not None


def forget(folder: Path | None) -> None:
  """Removes the folder of `kept`, if there is one."""
  if folder is not None and (folder / f'{_ABOUT}.json').exists():
    shutil.rmtree(folder, ignore_errors=True)


def _described(rows: Rows) -> dict[str, Any]:
  """What tells rows from others: the stamps of their files, or a checksum, as JSON values."""
  on_disk = inputs.stamps(rows.features)
  return {
    'rows': list(rows.features.shape),
    'features': [list(x) for x in on_disk] or files.crc(np.asarray(rows.features)),
    'labels': files.crc(rows.labels),
    'label_weight': None if rows.label_weight is None else files.crc(rows.label_weight),
    'annotator': None if rows.annotator is None else files.crc(rows.annotator),
  }


def minimise(
  model: Model, params: dict, rows: Any, *, max_iter: int, stops: Callable[[], bool], **limits: Any
) -> lbfgs.FitResult:
  """`lbfgs.minimise`; inside `kept` the search starts at what the folder has of it.

  Raises:
    exit_codes.Preempted: inside `kept`, a signal came; what has been found is in the folder.
  """
  searches = _current.get()
  if searches is None:
    return _made(model, params, rows, max_iter=max_iter, stops=stops, **limits)
  return searches.minimise(model, params, rows, max_iter, limits)


def _made(*args: Any, **settings: Any) -> lbfgs.FitResult:
  global _num_made
  _num_made += 1
  return lbfgs.minimise(*args, **settings)


def num_made() -> int:
  """How many searches this process has made, without those that a folder had."""
  return _num_made


class _Searches:
  """The searches of a folder."""

  def __init__(self, folder: Path, about: Mapping[str, Any]):
    self._folder = folder
    self._about = about
    self._count = 0
    self._waiting: dict[int, _Search] = {}  # to be written
    self._written = time.monotonic()
    there = run_files.read_json(folder / f'{_ABOUT}.json')
    begun = {f'.unfinished.{_ABOUT}.json'}  # what a kill at the start may leave
    if there is None and folder.exists() and {x.name for x in folder.iterdir()} - begun:
      raise ValueError(f'{folder} is there, and no fit has written it: name another place')
    numbers = run_files.numbered(folder, '', '.npz') if there else {}
    if jax.process_count() > 1:
      from het_plugin.system import processes  # imports orbax, which one process does without

      if len({*processes.gather(json.dumps([there, [*numbers]])).values()}) > 1:
        raise ValueError(f'{folder} must be in a folder that all processes share')
    if there == about:
      print(f'Goes on from {folder}, which has {len(numbers)} searches.', flush=True)
    elif there:
      names = ', '.join(x for x in about if there.get(x) != about[x])
      print(f'{folder} is of other {names}: this begins anew, and replaces it.', flush=True)

  def minimise(
    self, model: Model, params: dict, rows: Any, max_iter: int, limits: Mapping[str, Any]
  ) -> lbfgs.FitResult:
    number = self._count
    self._count += 1
    before = self._read(number, str(model))
    if before and before.has_ended:
      for text in before.warned:
        warnings.warn(text, ConvergenceWarning, stacklevel=3)
      return before.found
    begun = 0
    if before:
      params = jax.tree.map(_placed_as, before.found.params, params)
      begun = before.found.num_iterations

    def since_begun(found: lbfgs.FitResult) -> lbfgs.FitResult:
      return dataclasses.replace(found, num_iterations=begun + found.num_iterations)

    def keep(make: Callable[[], lbfgs.FitResult]) -> None:
      # The clocks of several processes differ, and `make` may take all of them.
      if jax.process_count() == 1 and time.monotonic() > self._written + _SECONDS:
        self._waiting[number] = _Search(since_begun(make()), False, [], str(model))
        self.write()

    left = max(1, max_iter - begun)
    more = {'stops': stopping.agreed, 'keep': keep}
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      found = _made(model, params, rows, **limits, max_iter=left, **more)
    for x in caught:
      warnings.warn_explicit(x.message, x.category, x.filename, x.lineno)
    is_stopped = stopping.agreed()
    if found.num_iterations or not is_stopped:
      warned = [str(x.message) for x in caught if issubclass(x.category, ConvergenceWarning)]
      self._waiting[number] = _Search(since_begun(found), not is_stopped, warned, str(model))
    if is_stopped:
      self.write()
      print(f'Stopped: the same command goes on from {self._folder}.', flush=True)
      raise exit_codes.Preempted(begun + found.num_iterations)
    if time.monotonic() > self._written + _SECONDS:
      self.write()
    return since_begun(found)

  def _is_ours(self) -> bool:
    """Whether the folder is of these searches: another program may have replaced or removed it."""
    return run_files.read_json(self._folder / f'{_ABOUT}.json') == self._about

  def write(self) -> None:
    """Writes what is waiting. All processes have the same, and the first one writes it."""
    if jax.process_index():
      self._waiting.clear()
    if self._waiting and not self._is_ours():
      if self._folder.exists():
        shutil.rmtree(self._folder)
      self._folder.mkdir(parents=True)
      run_files.write_json(self._folder / f'{_ABOUT}.json', dict(self._about))
    for number, search in self._waiting.items():
      about = dataclasses.asdict(dataclasses.replace(search.found, params={}))
      about = json.dumps({**search._asdict(), 'found': about})
      arrays = traverse_util.flatten_dict(jax.tree.map(np.asarray, search.found.params), sep='/')
      path = self._folder / f'{number:06}.npz'
      with run_files.replacing(path) as unfinished, unfinished.open('wb') as file:
        np.savez(file, **arrays, **{_ABOUT: np.array(about)})
    self._waiting.clear()
    self._written = time.monotonic()

  def _read(self, number: int, model: str) -> _Search | None:
    """What there is of a search; None for nothing, and for that of another model."""
    path = self._folder / f'{number:06}.npz'
    if not path.exists() or not self._is_ours():
      return None
    with files.reading(str(path)), np.load(path, allow_pickle=False) as arrays:
      about = json.loads(str(arrays[_ABOUT]))
      params = {name: arrays[name] for name in arrays.files if name != _ABOUT}
    found = {**about.pop('found'), 'params': traverse_util.unflatten_dict(params, sep='/')}
    search = _Search(lbfgs.FitResult(**found), **about)
    return search if search.model == model else None


def _placed_as(x: np.ndarray, other: Any) -> Any:
  return jax.device_put(x, other.sharding) if isinstance(other, jax.Array) else x


_current: contextvars.ContextVar[_Searches | None] = contextvars.ContextVar('kept', default=None)
