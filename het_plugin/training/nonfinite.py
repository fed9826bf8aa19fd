"""What a run does at a step whose loss, gradient or update is NaN or infinite.

The compiled step then leaves parameters and optimizer as they are (`trainer.apply_grads`). This
module decides whether the run goes on, and describes the step.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath
from jax.experimental import multihost_utils

from het_plugin.training import checkpoints, run_files
from het_plugin.training.state import TrainState

_log = logging.getLogger(__name__)

EXIT_CODE = 3
STOP, SKIP = 'stop', 'skip'


@dataclasses.dataclass(frozen=True)
class NonFinitePolicy:
  """What to do at a step that is not finite.

  Attributes:
    action: 'stop' ends the run at the first such step, 'skip' goes on with the next batch.
    max_skipped: with 'skip', how many such steps the run may have in all, over all resumptions;
      one more ends it.
    max_states: the train state is saved for the first so many.
  """

  action: str = STOP
  max_skipped: int = 10
  max_states: int = 3

  def __post_init__(self):
    if self.action not in (STOP, SKIP):
      raise ValueError(f"NonFinitePolicy.action={self.action!r} must be 'stop' or 'skip'.")
    for name in ('max_skipped', 'max_states'):
      if getattr(self, name) < 0:
        raise ValueError(f'NonFinitePolicy.{name}={getattr(self, name)} must be at least 0.')


DEFAULT_POLICY = NonFinitePolicy()


class NonFiniteStop(SystemExit):  # noqa: N818 (it is an exit, not an error)
  """Ends a run for a step that is not finite; makes a main exit with 3.

  Attributes:
    step: that step.
  """

  def __init__(self, step: int):
    super().__init__(EXIT_CODE)
    self.step = step


@dataclasses.dataclass(frozen=True)
class RunState:
  """What a checkpoint taken now would hold; see `checkpoints.Checkpointer.save`."""

  step: int
  train_state: TrainState
  dataset_state: Mapping[str, int]
  record: Mapping[str, Any]


class NonFiniteGuard:
  """Counts the steps that are not finite, describes each, and says when to stop.

  It writes MODEL_DIR/nonfinite/step_N.json for step N and, for the first few, a run directory
  MODEL_DIR/nonfinite/step_N with one checkpoint: a run started there goes through step N again.

  Attributes:
    num_skipped: steps of the whole run whose update was left out.
    stop: what to raise to end the run; None while it goes on.
  """

  def __init__(self, policy: NonFinitePolicy, model_dir: epath.PathLike, num_skipped: int):
    self._policy = policy
    self._folder = epath.Path(model_dir) / 'nonfinite'
    self.num_skipped = num_skipped
    self.stop: NonFiniteStop | None = None

  def report(
    self,
    step: int,
    values: Mapping[str, float],
    index: Sequence[int] | None,
    dataset_state: Mapping[str, int],
    now: RunState,
  ) -> None:
    """Takes a step that is not finite; all processes call it with the same values.

    Args:
      step: counted from 1.
      values: its metrics.
      index: batch['index'] of all its rows.
      dataset_state: of the input iterator before its batch.
      now: of the run, which may have dispatched a later step already.
    """
    path = self._folder / f'step_{step}.json'
    saves_state = self.num_skipped < self._policy.max_states
    self.num_skipped += 1
    most = self._policy.max_skipped
    if self._policy.action == STOP:
      verdict = "training stops, as NonFinitePolicy.action='stop' asks"
    elif self.num_skipped > most:
      verdict = f'training stops, after NonFinitePolicy.max_skipped={most} others'
    else:
      verdict = f'training goes on, {self.num_skipped} of at most {most} skipped'
    if verdict.startswith('training stops'):
      self.stop = NonFiniteStop(step)
    _log.error(
      'Step %d is not finite (loss %g, gradient norm %g, update norm %g) and changed no parameter: '
      '%s. See %s.',
      *(step, values['loss'], values['gradient_norm'], values['update_norm'], verdict, path),
    )
    state = now
    # A run that stops applies no later step (`Trainer.train_step`), even if it was dispatched: the
    # parameters are those before the step, of which only its number and batch are undone.
    if self._policy.action == STOP or now.step == step:
      train_state = now.train_state.replace(step=now.train_state.step - 1)
      state = RunState(step - 1, train_state, dataset_state, now.record)
    if jax.process_index() == 0:
      self._folder.mkdir(parents=True, exist_ok=True)
      row = {
        'step': step,
        **{name: x if math.isfinite(x) else str(x) for name, x in values.items()},
        'not_finite': [name for name, x in values.items() if not math.isfinite(x)],
        'index': index,
        'state_step': state.step if saves_state else None,
      }
      run_files.write_text(path, json.dumps(row, indent=1) + '\n')
    if saves_state:
      self._save(self._folder / f'step_{step}', state)

  def _save(self, folder: epath.Path, state: RunState) -> None:
    # An earlier attempt may have left one, perhaps with other parameters.
    if jax.process_index() == 0 and folder.exists():
      folder.rmtree()
    multihost_utils.sync_global_devices('remove an earlier state')
    checkpointer = checkpoints.Checkpointer(folder, checkpoints.SaveCheckpointConfig(period=1))
    checkpointer.save(state.step, state.train_state, state.dataset_state, state.record)
    checkpointer.close()
