"""One training run of a study: trained once, in its own folder, and read back from its files."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import gin
from het_plugin import reporting
from het_plugin.config import gin_state, parsing, uses
from het_plugin.data import task_info
from het_plugin.operations import run_status
from het_plugin.runs import opening, starting
from het_plugin.system import exit_codes, processes, run_files, stopping

_DONE = 'done.json'
_EVALUATIONS = ('training_eval', 'infer_eval')


@dataclasses.dataclass(frozen=True)
class Training:
  """The configuration of a run: gin files, then bindings 'NAME = VALUE'; later ones win."""

  gin_files: Sequence[str]
  gin_bindings: Sequence[str] = ()
  gin_search_paths: Sequence[str] = ('.',)

  def parse(self, run_dir: Path) -> None:
    bindings = [*self.gin_bindings, f'MODEL_DIR = {str(run_dir)!r}']
    parsing.parse_config(self.gin_files, bindings, self.gin_search_paths)


def complete(
  run: Training, run_dir: Path, finish: Callable[[Any], None] | None = None, **settings: Any
) -> bool:
  """Trains the run to its end, from where it was interrupted; leaves its gin configuration parsed.

  A run that was complete with another configuration, such as another split for evaluation, is
  evaluated again.

  Args:
    run, run_dir: the run, and its folder, which has done.json at the end.
    finish: process 0 calls it with the last train state; afterwards the run is complete.
    **settings: arguments of `train` that replace configured ones.

  Returns:
    False if the run was already complete with this configuration.

  Raises:
    ValueError: a setting is wrong, or the folder has another run.
    exit_codes.Preempted: SIGTERM arrived; call again to continue. It is also raised if the signal
      came so late that the run was completed.
  """
  run.parse(run_dir)
  config = gin.config_str()
  if (run_files.read_json(run_dir / _DONE) or {}).get('config') == config:
    return False
  step, state = starting.train_from_gin(how_to_accept=None, evaluate_again=True, **settings)

  def end() -> None:
    if finish is not None:
      finish(state)
    run_files.write_json(run_dir / _DONE, {'config': config})

  processes.in_the_first(end)
  if stopping.requested():
    raise exit_codes.Preempted(step)
  jax.clear_caches()  # the next run compiles everything anew
  return True


def check_used(
  typed: Sequence[str], runs: Sequence[Training], run_dir: Path, read: Collection[str] = ()
) -> None:
  """Checks that bindings of the command line have an effect on the runs of a study.

  Args:
    typed: bindings 'NAME = VALUE'.
    runs: one or more. They have the typed bindings, and those that the study adds.
    run_dir: as of `complete`; the configuration of the last run stays parsed.
    read: names that the study reads and replaces; they have an effect.

  Raises:
    ValueError: no run uses a binding (`uses.check`), or all of them bind something else in its
      place.
  """
  texts = []
  overridden = [binding for binding in typed if binding.partition('=')[0].strip() not in read]
  for run in runs:
    run.parse(run_dir)
    texts.append(gin.config_str())
    overridden = [binding for binding in overridden if not _holds(binding, texts[-1])]
  uses.check(typed, *texts)
  if overridden:
    raise ValueError(f'--gin.{overridden[0]} has no effect: the study binds it for every run')


def _holds(binding: str, text: str) -> bool:
  """Whether a binding changes nothing about the parsed configuration, whose text is given."""
  with gin_state.preserved(), gin.unlock_config():
    gin.parse_config(binding)
    return gin.config_str() == text


def final_evaluations(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
  """The last evaluations, {'training_eval/TASK' or 'infer_eval/TASK': {'step', 'nll', ...}}.

  `metrics` are the lines of a run's metrics.jsonl. Values that were not finite are NaN.
  """
  found = {}
  for line in metrics:
    values = {}
    for name, value in line.items():
      group, _, metric = name.rpartition('/')
      if group.split('/')[0] in _EVALUATIONS:
        value = math.nan if value is None else value
        values.setdefault(group, {'step': line['step']})[metric] = value
    found |= values
  return found


def draw_curves(folders: Mapping[str, Path], caption: str) -> dict[str, reporting.Figure]:
  """{'curves': loss and temperature by step} of the runs in {title: folder}."""
  lines = {}
  for title, folder in folders.items():
    found = run_status.curves(run_files.read_lines(folder / 'metrics.jsonl')).get('train', {})
    lines[title] = {name: x for name, x in found.items() if name in ('step', 'loss', 'tau')}
  alt = 'Training loss and temperature tau by step.'
  return {'curves': reporting.Figure(reporting.curve_pngs(lines), caption, alt)}


def ms_per_step(metrics: Sequence[Mapping[str, Any]]) -> float | None:
  """The median time per step in the lines of a run's metrics.jsonl; None if there is none."""
  name = 'train/timing/ms_per_step'
  speeds = [line[name] for line in metrics if name in line]
  return statistics.median(speeds) if speeds else None


def called(macro: str) -> Any:
  """The value of a macro of the parsed configuration that is a reference, such as @vit()."""
  return gin.query_parameter(f'%{macro}').scoped_configurable_fn()


def configured_model() -> tuple[Any, Any]:
  """The model of the parsed configuration and its `ParamCounts`; nothing is computed."""
  model = called('MODEL')
  lengths = gin.query_parameter('%TASK_FEATURE_LENGTHS')
  channels = task_info(gin.query_parameter('%MIXTURE_OR_TASK_NAME')).channels
  variables = jax.eval_shape(lambda: opening.initial_variables(model, lengths, channels))
  return model, model.count_params(variables['params'])
