"""What a run does at a step whose loss, gradient or update is NaN or infinite.

The compiled step leaves parameters and optimizer unchanged (`step.apply_grads`). This module
decides whether the run continues, and describes the step.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import jax
from etils import epath

from het_plugin.system import ranges, run_files

_log = logging.getLogger(__name__)

EXIT_CODE = 3
STOP = 'stop'
SKIP = 'skip'


@dataclasses.dataclass(frozen=True)
class NonFinitePolicy:
  """What to do at a step that is not finite.

  Attributes:
    action: 'stop' ends the run at the first such step, 'skip' continues with the next batch.
    max_skipped: with 'skip', the number of such steps that the run may have, over all resumptions;
      one more ends it.
  """

  action: Literal[STOP, SKIP] = STOP
  max_skipped: Annotated[int, '[0, inf)'] = 10

  def __post_init__(self):
    ranges.check(self)


DEFAULT_POLICY = NonFinitePolicy()


class NonFiniteStop(SystemExit):  # noqa: N818 (it is an exit, not an error)
  """Ends a run because `step` is not finite; makes a command exit with 3."""

  def __init__(self, step: int):
    super().__init__(EXIT_CODE)
    self.step = step


class NonFiniteGuard:
  """Counts the steps that are not finite, describes each, and says when to stop.

  It writes MODEL_DIR/nonfinite/step_N.json for step N. To see step N again, resume from the
  checkpoint before it: a run repeats its steps bit for bit.

  Attributes:
    num_skipped: number of steps of the whole run whose update was left out.
    stop: the exception to raise to end the run; None while it continues.
  """

  def __init__(self, policy: NonFinitePolicy, model_dir: epath.PathLike, num_skipped: int):
    self._policy = policy
    self._folder = epath.Path(model_dir) / 'nonfinite'
    self.num_skipped = num_skipped
    self.stop: NonFiniteStop | None = None

  def report(self, step: int, values: Mapping[str, float], index: Sequence[int] | None) -> None:
    """Takes a step that is not finite, counted from 1, its metrics, and batch['index'] of all of
    its rows; all processes call it with the same values.
    """
    path = self._folder / f'step_{step}.json'
    self.num_skipped += 1
    most = self._policy.max_skipped
    if self._policy.action == STOP:
      verdict = "training stops, as NonFinitePolicy.action='stop' asks"
    elif self.num_skipped > most:
      verdict = f'training stops, after NonFinitePolicy.max_skipped={most} others'
    else:
      verdict = f'training continues, with {self.num_skipped} of at most {most} steps skipped'
    if verdict.startswith('training stops'):
      self.stop = NonFiniteStop(step)
    _log.error(
      'Step %d is not finite (loss %g, gradient norm %g, update norm %g) and changed no parameter: '
      '%s. See %s.',
      step,
      values['loss'],
      values['gradient_norm'],
      values['update_norm'],
      verdict,
      path,
    )
    if jax.process_index() == 0:
      row = {
        'step': step,
        **{name: x if math.isfinite(x) else str(x) for name, x in values.items()},
        'not_finite': [name for name, x in values.items() if not math.isfinite(x)],
        'index': index,
      }
      run_files.write_text(path, json.dumps(row, indent=1) + '\n')
