"""Checkpoints of a run: train state, input position and a small record, saved together by orbax.

orbax writes a checkpoint under a temporary name and renames it when it is complete, so a crash
never leaves an incomplete `checkpoint_n`. This module adds two things:

- Every array and every JSON value is verified on reading (`checkpoint_reader`). A damaged
  checkpoint is set aside, and the one before it is used.
- If a save fails on one process, for example because a disk is full, all processes end soon with
  one sentence, and none waits for another until a barrier times out (`_Barrier`). A process that is
  already in a step which another does not begin ends when JAX notices that the other has gone.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from etils import epath

from het_plugin import weights
from het_plugin.system import checksum, processes, ranges
from het_plugin.system.ranges import Count, Pattern
from het_plugin.training import checkpoint_reader
from het_plugin.training.checkpoint_reader import PREFIX, Unreadable
from het_plugin.training.state import TrainState

_log = logging.getLogger(__name__)

PyTree = Any
# Replicas share the writing of a replicated array if each gets so much; smaller arrays are written
# by one. A share is a program to compile for every shape and device: on eight devices the first
# save of a small ViT waited six seconds for 88 of them.
MIN_SHARE_BYTES = 2**14


@dataclasses.dataclass(frozen=True)
class SaveCheckpointConfig:
  """When and how checkpoints are saved.

  Attributes:
    period: steps between checkpoints; the last step is always saved.
    keep: number of newest checkpoints to keep; None keeps all.
    dtype: 'bfloat16' stores floating-point arrays in half the space; a run that resumes from these
      continues from rounded parameters.
    save_dataset: whether to save the input position; without it a resumed run starts again with the
      first example.
  """

  period: Count
  keep: Count | None = None
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  save_dataset: bool = True

  def __post_init__(self):
    ranges.check(self)


@dataclasses.dataclass(frozen=True)
class RestoreCheckpointConfig:
  """Source of the initial parameters; optimizer state and step start afresh.

  Attributes:
    path: a run's directory, one of its checkpoints (ours or t5x's), or a published file.
    mode: 'latest' takes the checkpoint at `path`, or the newest one of the run there; 'specific'
      takes a checkpoint only.
    assignment_map: (pattern, replacement) pairs. A parameter of the model ('head/kernel') whose
      whole name matches a pattern is read from the replacement (re.sub syntax), or initialised if
      the replacement is None.
    fallback_to_scratch: True initialises parameters that the checkpoint lacks and ignores those
      that the model lacks (for example DET to HET-XL). False makes both an error.
    head: 'keep' reads the head, and the model must have the same classes; 'init' initialises it.
    skip: for a published file (.npz or .safetensors, see `weights`): regular expressions of the
      names to ignore.
    ema: True reads the average that `with_ema` kept instead of the parameters.
  """

  path: str
  mode: Literal['latest', 'specific'] = 'latest'
  assignment_map: Sequence[tuple[Pattern, str | None]] = ()
  fallback_to_scratch: bool = False
  head: Literal[weights.HEADS] = 'keep'
  skip: Sequence[Pattern] = ()
  ema: bool = False

  def __post_init__(self):
    ranges.check(self)

  @property
  def starts_afresh(self) -> bool:
    """Whether parameters that the checkpoint has may be initialised."""
    return self.head == weights.INIT or any(name is None for _, name in self.assignment_map)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Saving and restoring of a run."""

  save: SaveCheckpointConfig | None = None  # None saves nothing
  restore: RestoreCheckpointConfig | None = None  # None initialises all parameters


@dataclasses.dataclass(frozen=True)
class RunState:
  """The progress of a run, as `Checkpointer.save` takes it."""

  train_state: TrainState
  dataset_state: dict[str, int] | None = None  # None if it was not saved
  record: dict[str, Any] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def step(self) -> int:
    """Number of steps done."""
    return int(self.train_state.step)

  @property
  def evaluated(self) -> bool:
    """Whether the evaluations of `step` are done."""
    return self.record.get('evaluated', True)


class SaveFailed(SystemExit):  # noqa: N818 (it is an exit, not an error)
  """Raised on all processes when a checkpoint cannot be written; a command exits with code 1.

  The message is one sentence with the step, the reason and the newest complete checkpoint.
  """


class _PeerFailed(RuntimeError):  # noqa: N818 (the failure is elsewhere)
  """Another process cannot reach the barrier."""


class _Barrier:
  """The barrier of the threads that write a checkpoint on several processes.

  A process whose write fails skips the remaining barriers of the write and continues at a later
  one.
  If barriers are matched by name, the others wait at the earlier one until they time out, in orbax
  after 20 minutes. Here all processes meet at any barrier, and all fail if their keys differ.
  """

  def __init__(self):
    self._folder = f'het_plugin/barrier/{next(_numbers)}'
    self._meetings = itertools.count()
    self._failed = False

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits until all processes have reached a barrier; `key` names the barrier of this process."""
    if self._failed:
      raise _PeerFailed('another process has failed')
    folder = f'{self._folder}/{next(self._meetings)}'
    self._failed = set(processes.exchange(folder, key, timeout_ms).values()) != {key}
    if self._failed:
      raise _PeerFailed('another process has failed')


_numbers = itertools.count()  # numbers barriers, which all processes make in the same order


class _Manager(ocp.CheckpointManager):
  """orbax's manager without its own queries of the preemption service.

  `operations.stopping` queries the service with its own counter, and two counters would disagree.
  """

  def reached_preemption(self, step: int) -> bool:
    return False


def _array_handler() -> ocp.PyTreeCheckpointHandler:
  arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_SHARE_BYTES)
  registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
  return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class Checkpointer:
  """Saves to and resumes from one run's directory; all processes call its methods together."""

  def __init__(self, model_dir: epath.PathLike, save_cfg: SaveCheckpointConfig | None):
    """Opens the directory; creates it if it is missing."""
    self._save_cfg = save_cfg
    self._directory = epath.Path(model_dir).absolute()
    processes.in_the_first(functools.partial(checkpoint_reader.commit, self._directory))
    barrier = _Barrier() if jax.process_count() > 1 else None
    self._manager = _Manager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        step_prefix=PREFIX,
        preservation_policy=ocp.checkpoint_managers.LatestN(save_cfg.keep if save_cfg else None),
        cleanup_tmp_directories=True,
        # File systems with a cache may show different listings to different processes.
        single_host_load_and_broadcast=True,
        async_options=ocp.options.AsyncOptions(barrier_sync_fn=barrier),
      ),
      item_handlers={
        'state': _array_handler(),
        'dataset': ocp.JsonCheckpointHandler(),
        'record': ocp.JsonCheckpointHandler(),
      },
    )
    self._watcher = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint')
    self._saving: concurrent.futures.Future | None = None  # done when the last save is on disk
    self._saving_step = 0

  def save(
    self,
    step: int,
    train_state: TrainState,
    dataset_state: Mapping[str, int],
    record: Mapping[str, Any],
    flush: Callable[[], None] | None = None,
  ) -> None:
    """Saves in the background, unless this step is saved already or the run saves nothing.

    Returns once the state is copied off the device, so that its buffers may be donated. The record
    has a few JSON values about the run. `flush` writes what must be on disk before the checkpoint.

    Raises:
      SaveFailed: the previous checkpoint could not be written, or `flush` failed.
    """
    if self._save_cfg is None:
      return
    self.wait_until_finished()
    if flush is not None:
      self._check(step, checkpoint_reader.attempt(flush)[1])
    if step in self._manager.all_steps():
      return
    arrays = _arrays(train_state)
    if self._save_cfg.dtype != 'float32':
      arrays = jax.tree.map(lambda x: checkpoint_reader.cast(x, self._save_cfg.dtype), arrays)
    items = {'state': ocp.args.PyTreeSave(arrays)}
    if self._save_cfg.save_dataset:
      items['dataset'] = ocp.args.JsonSave(dict(dataset_state))
    sealed = checkpoint_reader.seal(
      record,
      dict(dataset_state) if self._save_cfg.save_dataset else None,
      checksum.array_checksums(checkpoint_reader.named(arrays)),
      step,
    )
    items['record'] = ocp.args.JsonSave(sealed)
    _, failure = checkpoint_reader.attempt(
      functools.partial(self._manager.save, step, args=ocp.args.Composite(**items), force=True)
    )
    self._saving_step = step
    self._saving = self._watcher.submit(self._wait, failure)

  def _wait(self, failure: Exception | None) -> None:
    if failure is not None:
      raise failure
    self._manager.wait_until_finished()

  def raise_failure(self) -> None:
    """Raises SaveFailed if the last save has failed already; cheap enough for every step."""
    if self._saving is not None and self._saving.done():
      self.wait_until_finished()

  def wait_until_finished(self) -> None:
    """Blocks until the last save is on disk; SaveFailed if it failed on some process."""
    if self._saving is not None:
      saving = self._saving
      self._saving = None
      self._check(self._saving_step, saving.exception())

  def _check(self, step: int, failure: BaseException | None) -> None:
    """Raises SaveFailed for a failure."""
    if failure is None:
      return
    while isinstance(failure, _PeerFailed) and failure.__context__ is not None:
      failure = failure.__context__  # the first failure on this process
    complete = checkpoint_reader.steps(self._directory)
    newest = (
      f'the newest complete one is {self._path(max(complete))}, from which the same command resumes'
      if complete
      else 'the run has no complete one, so the same command starts it again'
    )
    raise SaveFailed(
      f'Error: the checkpoint of step {step} cannot be written '
      f'({checkpoint_reader.one_line(failure)}); {newest}.'
    ) from failure

  def restore(self, target: TrainState) -> RunState | None:
    """Reads the newest intact checkpoint; returns None if the run has no checkpoint.

    Damaged checkpoints are reported and skipped. Once an older one is read, they are renamed to
    `unreadable_checkpoint_n`. The target is shapes with shardings, perhaps of another mesh.

    Raises:
      ValueError: parameters of the checkpoint do not match the target's, or none of the run's
        checkpoints is intact.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    reasons = []
    for i, step in enumerate(steps):
      path = self._path(step)
      try:
        restored = _restore(path, target)
      except Unreadable as unreadable:
        _log.error('Skipping %s, which cannot be read: %s', path, unreadable.reason)
        reasons.append(unreadable.reason.rstrip('.'))
        continue
      _log.info('Resuming from %s.', path)
      self._set_aside(steps[:i])
      return restored
    if steps:
      raise ValueError(
        f'no checkpoint in model_dir={self._directory} can be read (newest of {len(steps)}: '
        f'{reasons[0]}). Restore one from a copy, or take another model_dir'
      )
    return None

  def _path(self, step: int) -> epath.Path:
    return self._directory / f'{PREFIX}_{step}'

  def _set_aside(self, steps: Sequence[int]) -> None:
    """Frees the names of damaged checkpoints, which this run will save again, but keeps the files.

    All processes call it; process 0 renames.
    """
    if not steps:
      return

    def rename() -> None:
      for step in steps:
        target = self._directory / f'unreadable_{PREFIX}_{step}'
        number = 1
        while target.exists():
          number += 1
          target = target.with_name(f'unreadable_{PREFIX}_{step}.{number}')
        self._path(step).rename(target)

    processes.in_the_first(rename)
    self._manager.reload()

  def close(self) -> None:
    """Waits for the last save and ends the background threads; logs a failure."""
    _, failure = checkpoint_reader.attempt(self._manager.close)
    self._watcher.shutdown()
    if failure is not None and self._saving is not None:  # no SaveFailed has reported it
      _log.error('The checkpoint of step %d was not written: %s', self._saving_step, failure)


def _restore(path: epath.Path, target: TrainState) -> RunState:
  """Raises Unreadable if it is damaged, ValueError if it belongs to another model."""
  arrays = _arrays(target)
  wanted = checkpoint_reader.named(arrays)
  description, saved = checkpoint_reader.describe(path)
  if description is None:
    raise Unreadable(path, 'it has no record.')
  shapes = ({name: tuple(x.shape) for name, x in side.items()} for side in (wanted, saved))
  try:
    checkpoint_reader.check_match(path, *shapes)
  except ValueError as error:
    raise ValueError(
      f'{error} A run keeps its shapes. To begin with the parameters of this checkpoint, take '
      f'another model_dir, with CheckpointConfig.restore = @RestoreCheckpointConfig() and '
      f'RestoreCheckpointConfig.path = {str(path)!r}; RestoreCheckpointConfig.assignment_map can '
      'leave out parameters whose shapes differ.'
    ) from error
  read = checkpoint_reader.read_to(path, wanted, description)
  read = jax.tree.unflatten(jax.tree.structure(arrays), [read[name] for name in wanted])
  return RunState(target.replace(**read), description.dataset_state, description.record)


def _arrays(train_state: TrainState) -> dict[str, PyTree]:
  return {
    'step': train_state.step,
    'params': train_state.params,
    'opt_state': train_state.opt_state,
  }
