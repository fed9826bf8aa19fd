"""Temperatures to try next, by Vizier's default algorithm: a Gaussian process and UCB with pure
exploration in a batch (Song et al. 2022, https://arxiv.org/abs/2207.13676; Golovin et al. 2017).

In a process of its own: Vizier needs JAX's 64-bit mode and a CPU, and training has neither. It is
started once, for its imports take longer than a first answer, and ends with this process. It keeps
nothing of what it is asked: all trials so far come in, so a study goes on from its own record.
"""

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

_METRIC, _PARAMETER = 'nll', 'tau'
_ANSWER = 'taus: '  # starts the line of an answer; Vizier may print others
_NEEDED = ('vizier', 'equinox', 'tensorflow_probability', 'typeguard', 'jaxtyping', 'chex')


def check_installed() -> None:
  """Raises ValueError where Vizier cannot be had."""
  if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    raise ValueError(
      f'Bayesian optimization needs google-vizier, and {", ".join(missing)} is not installed: '
      "pip install 'het_plugin[tune]', or leave bayesian out of --method"
    )


def suggest(
  trials: Sequence[Mapping[str, float | None]],
  count: int,
  bounds: tuple[float, float],
  seed: int,
  cache_dir: str,
) -> list[float]:
  """Temperatures to try at the same time.

  Args:
    trials: {'tau': temperature, 'nll': what is minimised, None where training failed} so far.
    count: how many to suggest.
    bounds: of tau, which is searched on a logarithmic scale.
    seed: of the suggestions.
    cache_dir: where compiled programs are kept.

  Returns:
    Temperatures, rounded to four digits.

  Raises:
    RuntimeError: Vizier failed; with the end of what it said.
  """
  request = {'trials': list(trials), 'count': count, 'bounds': bounds, 'seed': seed}
  process, errors = _process(cache_dir)
  line = ''
  try:
    process.stdin.write(json.dumps(request) + '\n')
    process.stdin.flush()
    line = next((line for line in process.stdout if line.startswith(_ANSWER)), '')
  except BrokenPipeError:
    pass
  if not line:
    _process.cache_clear()  # the next one may fare better
    process.wait()
    errors.seek(0)
    raise RuntimeError(f'Vizier made no suggestions: {errors.read()[-2000:]}')
  low, high = bounds
  taus = json.loads(line.removeprefix(_ANSWER))
  return [min(max(float(f'{tau:.4g}'), low), high) for tau in taus]


@functools.cache
def _process(cache_dir: str) -> tuple[subprocess.Popen, IO[str]]:
  """The process that answers, and what it writes to stderr."""
  environment = os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'JAX_ENABLE_X64': '1',
    'XLA_FLAGS': '',
    'JAX_COMPILATION_CACHE_DIR': cache_dir,
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }
  errors = tempfile.TemporaryFile('w+')
  process = subprocess.Popen(
    [sys.executable, '-c', f'from {__name__} import answer; answer()'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=errors,
    env=environment,
    text=True,
  )
  return process, errors


def _suggest(request: Mapping[str, Any]) -> list[float]:
  import jax
  from vizier import algorithms, pyvizier

  # Not vizier.algorithms.designers, which imports what its other algorithms need too.
  from vizier._src.algorithms.designers import gp_ucb_pe
  from vizier.pyvizier.converters import padding

  problem = pyvizier.ProblemStatement()
  problem.search_space.root.add_float_param(
    _PARAMETER, *request['bounds'], scale_type=pyvizier.ScaleType.LOG
  )
  goal = pyvizier.ObjectiveMetricGoal.MINIMIZE
  problem.metric_information.append(pyvizier.MetricInformation(_METRIC, goal=goal))
  rng = jax.random.fold_in(jax.random.PRNGKey(request['seed']), len(request['trials']))
  # Without padding every round compiles anew; what is suggested is the same.
  schedule = padding.PaddingSchedule(num_trials=padding.PaddingType.POWERS_OF_2)
  designer = gp_ucb_pe.VizierGPUCBPEBandit(problem, rng=rng, padding_schedule=schedule)
  completed = []
  for number, trial in enumerate(request['trials'], 1):
    done = pyvizier.Trial(id=number, parameters={_PARAMETER: trial['tau']})
    if trial['nll'] is None or not math.isfinite(trial['nll']):
      done.complete(pyvizier.Measurement(), infeasibility_reason='training failed')
    else:
      done.complete(pyvizier.Measurement({_METRIC: trial['nll']}))
    completed.append(done)
  designer.update(algorithms.CompletedTrials(completed), algorithms.ActiveTrials())
  suggestions = designer.suggest(request['count'])
  return [suggestion.parameters.get_value(_PARAMETER) for suggestion in suggestions]


def answer() -> None:
  """The process that `suggest` starts: requests, a line each, from stdin; ends with it."""
  for line in sys.stdin:
    print(_ANSWER + json.dumps(_suggest(json.loads(line))), flush=True)
