"""The jobs of a launch: the arguments of training for each combination of swept values.

Nothing here starts a job or needs XManager.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from het_plugin import reporting
from het_plugin.cli.settings import Gin
from het_plugin.commands import train
from het_plugin.system import flag_values, run_files, screen

HEAD = 'head'
MODEL_DIR = 'MODEL_DIR'
TRAIN = ('-m', 'het_plugin.train')  # arguments of Python for training


@dataclasses.dataclass(frozen=True)
class Job:
  """One training run, named by its swept values.

  `model_dir` is the same at every launch, so launching again resumes it.
  """

  name: str
  model_dir: str
  gin_files: tuple[str, ...]
  gin_bindings: tuple[str, ...]
  gin_search_paths: tuple[str, ...] = ('.',)
  train_flags: tuple[str, ...] = ()

  def arguments(self) -> list[str]:
    """The arguments of het_plugin.train.

    They are a list because XManager changes mappings: it turns True into `--gin.X`, False into
    `--nogin.X`, and drops None.
    """
    arguments = [f'--gin_file={file}' for file in self.gin_files]
    if self.gin_search_paths != ('.',):
      arguments.append(f'--gin_search_paths={",".join(self.gin_search_paths)}')
    for binding in (*self.gin_bindings, f'{MODEL_DIR} = {self.model_dir!r}'):
      name, value = split_binding(binding)
      arguments.append(f'--gin.{name}={value}')
    return [*arguments, *self.train_flags]


def split_binding(binding: str) -> tuple[str, str]:
  """('NAME', 'VALUE') of 'NAME = VALUE'; another form is a ValueError."""
  name, _, value = (part.strip() for part in binding.partition('='))
  if not (name and value):
    raise ValueError(f'--gin_bindings={binding!r} must be NAME=VALUE')
  return name, value


def given_flags() -> list[str]:
  """The flags of training on the command line, as arguments of training.

  They include those of JAX and of the log, without gin's (`make_jobs` has these).
  """
  ours, of_gin = ({x.name for x in dataclasses.fields(of)} for of in (train.Settings, Gin))
  ours -= of_gin - {'allow_imports'}
  modules = 'jax', 'absl.logging', screen.__name__
  return [
    flag.serialize()
    for module, defined in sorted(flags.FLAGS.flags_by_module_dict().items())
    for flag in defined
    if flag.present
    and (flag.name in ours or module in modules or module.partition('.')[0] == 'jax')
  ]


def make_jobs(
  model_dir: str,
  gin_files: Sequence[str],
  gin_bindings: Sequence[str] = (),
  gin_search_paths: Sequence[str] = ('.',),
  heads: Sequence[str] = (),
  sweeps: Sequence[str] = (),
  train_flags: Sequence[str] = (),
) -> list[Job]:
  """One job per combination of head and swept values; heads change slowest.

  With a sweep, jobs have sub-folders of `model_dir`. `heads` are names of gin/heads/*.gin, included
  after the other files, and `sweeps` 'NAME=VALUE,VALUE,...' each.

  Raises:
    ValueError: a sweep is wrong, a name is swept or bound twice, or a file or folder is missing.
  """
  if not model_dir:
    raise ValueError('--model_dir is not given: name the folder of the run')
  if model_dir.startswith('~'):
    raise ValueError(f'--model_dir={model_dir}: only a shell expands ~; write the full path')
  if not gin_files:
    raise ValueError('no --gin_file is given: training needs at least one')
  bound = [split_binding(binding)[0] for binding in gin_bindings]
  axes = [flag_values.parse_sweep(sweep) for sweep in sweeps]
  if HEAD in dict(axes):
    raise ValueError(f'--sweep={HEAD}=... is no sweep of gin: use --heads')
  if heads:
    axes.insert(0, (HEAD, list(heads)))
  names = [name for name, _ in axes]
  for name in (*bound, *names):
    if name == MODEL_DIR:
      raise ValueError(f'{MODEL_DIR} is set by the launcher: use --model_dir')
  for name in names:
    if names.count(name) > 1 or name in bound:
      raise ValueError(f'--sweep={name}=... is swept twice, or swept and bound')
  jobs = []
  for values in itertools.product(*(values for _, values in axes)):
    chosen = list(zip(names, values, strict=True))
    name = job_name(chosen)
    files = [f'het_plugin/gin/heads/{value}.gin' for key, value in chosen if key == HEAD]
    bindings = [f'{key} = {value}' for key, value in chosen if key != HEAD]
    jobs.append(
      Job(
        name=name,
        model_dir=f'{model_dir.rstrip("/")}/{name}' if axes else model_dir,
        gin_files=(*gin_files, *files),
        gin_bindings=(*gin_bindings, *bindings),
        gin_search_paths=tuple(gin_search_paths),
        train_flags=tuple(train_flags),
      )
    )
  if len({job.name for job in jobs}) < len(jobs):
    raise ValueError('two swept values give the same folder name: write them differently')
  return jobs


def job_name(chosen: Sequence[tuple[str, str]]) -> str:
  """The swept values as the name of a folder, for example 'het_xl-RANDOM_SEED=1'."""
  parts = [value if name == HEAD else f'{name}={value}' for name, value in chosen]
  return re.sub(r'[^\w.=+-]+', '_', '-'.join(parts))


_METRICS = ('nll', 'loss', 'precision_at_1', 'precision_at_5', 'ece', 'tau')


def results(model_dirs: Sequence[str], codes: Sequence[int]) -> list[list[str]]:
  """A table of runs on this machine: folder, exit code, last step and last validation metrics."""
  found = [_last_metrics(Path(folder) / 'metrics.jsonl') for folder in model_dirs]
  metrics = [name for name in _METRICS if any(name in row for row in found)]
  lines = [
    [
      folder,
      str(code),
      reporting.cell(row.get('step'), spec=''),
      *(reporting.cell(row.get(name), spec='.4g') for name in metrics),
    ]
    for folder, code, row in zip(model_dirs, codes, found, strict=True)
  ]
  return [['run', 'exit code', 'step', *metrics], *lines]


def _last_metrics(path: Path) -> dict[str, float]:
  last = {}
  for row in run_files.read_lines(path) if path.exists() else ():
    last['step'] = row['step']
    last |= {k.rpartition('/')[2]: x for k, x in row.items() if k.startswith('training_eval/')}
  return last
