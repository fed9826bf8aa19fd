"""Launches a training run, or a sweep of them, with XManager.

    python -m launch.xm_launch --gin_file=gin/runs/digits_smoke.gin --model_dir=runs/sweep \\
      --heads=det,het_xl --sweep=RANDOM_SEED=0,1 --sweep=LEARNING_RATE=1e-3,3e-3 --dry_run

Takes the gin files and flags of training.

    --executor=local   runs jobs as processes of this machine, at most --max_parallel at a time, and
                       restarts those that were preempted (exit code 42) or killed. Ctrl-C lets all
                       running jobs save and stop.
    --executor=vertex  runs jobs on TPU v2 or v3, the only TPUs of XManager's Vertex executor.
    --executor=gke     applies one JobSet per job with kubectl (launch/gke/render.py). XManager's
                       own Kubernetes executor requests no TPUs.

Repeating a launch resumes its jobs. --dry_run prints all jobs and needs no XManager; local and
vertex need it: pip install '.[launch]'.

Exit codes: 0 all jobs are done, or were submitted; 1 a job failed; 2 a setting is wrong; 42 the
launch was interrupted.
"""

import asyncio
import contextlib
import importlib.util
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from het_plugin.config import command_line, parsing, training_run
from het_plugin.planning import topology as topology_lib
from launch import supervise, sweep
from launch.gke import render

EXECUTORS = ('local', 'vertex', 'gke')
VERTEX_CORES_PER_CHIP = 2  # XManager counts cores: tpu_v3=8 is a 2x2
FAILED = 1


def define_flags() -> None:
  command_line.define_flags()
  training_run.define_flags()
  render.define_settings_flags()
  flags.DEFINE_enum('executor', 'local', EXECUTORS, 'Where the jobs run.')
  flags.DEFINE_string('name', 'het-plugin', 'Name of the experiment and of JobSets.')
  flags.DEFINE_string('model_dir', '', 'Folder of the run; with a sweep, jobs have sub-folders.')
  flags.DEFINE_list('heads', [], 'Names of gin/heads/*.gin, one job each.')
  flags.DEFINE_multi_string(
    'sweep', [], 'NAME=VALUE,VALUE,... with NAME and VALUE as in --gin.NAME=VALUE; repeatable.'
  )
  flags.DEFINE_integer('max_parallel', 1, 'Number of local jobs at a time.')
  flags.DEFINE_bool('dry_run', False, 'Print all jobs and launch none.')
  if importlib.util.find_spec('xmanager'):
    from xmanager import xm_flags  # noqa: F401 (defines --xm_...)


def local_command(job: sweep.Job, max_restarts: int, grace_seconds: int) -> list[str]:
  """The command of a local job: training under a supervisor that stops when this process ends."""
  return [
    *(sys.executable, '-m', 'launch.supervise', f'--folder={job.model_dir}'),
    *(f'--max_restarts={max_restarts}', f'--max_failures={max_restarts}'),
    f'--grace_seconds={grace_seconds}',
    # XManager would report other exit codes with several tracebacks.
    *(f'--end_with={os.getpid()}', '--exit_zero', '--'),
    *(sys.executable, *sweep.TRAIN, *job.arguments()),
  ]


def vertex_requirements(topology: str | None) -> dict[str, int]:
  """The arguments of xm.JobRequirements.

  Raises:
    ValueError: there is no topology, or XManager's Vertex executor does not support it.
  """
  generation, shape = topology_lib.parse(topology or '')
  if generation not in ('v2', 'v3'):
    raise ValueError(
      f'--topology={topology}: XManager on Vertex supports TPU v2 and v3 only; use '
      '--executor=gke or launch/tpu_vm.sh'
    )
  chips = math.prod(map(int, shape.split('x')))
  return {f'tpu_{generation}': chips * VERTEX_CORES_PER_CHIP}


def jobset_of(index: int, job: sweep.Job, num_jobs: int) -> dict[str, Any]:
  """The JobSet of a job, called NAME, or NAME-INDEX if there are several."""
  name = flags.FLAGS.name
  return render.jobset(render.settings_of_flags(f'{name}-{index}' if num_jobs > 1 else name), job)


def check(jobs: Sequence[sweep.Job]) -> None:
  """Raises ValueError if the jobs cannot be launched as the flags say."""
  values = flags.FLAGS
  for head in values.heads:
    if not os.path.isfile(parsing.resolve(f'het_plugin/gin/heads/{head}.gin')):
      known = sorted(path.stem for path in (parsing.gin_root() / 'heads').glob('*.gin'))
      raise ValueError(f'--heads={head} is unknown: choose from {", ".join(known)}')
  remote = values.model_dir.startswith('gs://')
  if values.executor == 'local':
    if remote:
      raise ValueError(
        f'--model_dir={values.model_dir} must be a local folder: --executor=local keeps logs in it'
      )
    if values.max_parallel < 1 or values.max_restarts < 0 or values.grace_seconds < 1:
      raise ValueError(
        f'--max_parallel={values.max_parallel} and --grace_seconds={values.grace_seconds} must be '
        f'at least 1, --max_restarts={values.max_restarts} at least 0'
      )
  elif values.executor == 'vertex':
    vertex_requirements(values.topology)
    if not remote or not values.image:
      raise ValueError(
        f'--executor=vertex needs --model_dir=gs://... and --image, not {values.model_dir!r} and '
        f'{values.image!r}'
      )
  else:
    for index, job in enumerate(jobs):
      jobset_of(index, job, len(jobs))


def description(index: int, job: sweep.Job, num_jobs: int) -> str:
  """The text of --dry_run for a job."""
  values = flags.FLAGS
  lines = [f'[{index + 1}/{num_jobs}] {job.name or values.name}']
  if values.executor == 'local':
    command = local_command(job, values.max_restarts, values.grace_seconds)
    lines += ['executor: xm_local.Local', 'requirements: none', f'command: {shlex.join(command)}']
  elif values.executor == 'vertex':
    lines += [
      'executor: xm_local.Vertex',
      f'requirements: {vertex_requirements(values.topology)}',
      f'image: {values.image}',
      f'arguments: {shlex.join(job.arguments())}',
    ]
  else:
    lines += [
      f'executor: JobSet, {values.num_slices} x {values.topology}',
      render.to_yaml(jobset_of(index, job, num_jobs)).rstrip(),
    ]
  return '\n  '.join('\n'.join(lines).splitlines())


class LocalSweep:
  """Runs jobs on this machine.

  Attributes:
    codes: exit codes of the jobs that have ended, by name.
    interrupted: whether Ctrl-C or SIGTERM ended the launch.
  """

  def __init__(self, jobs: Sequence[sweep.Job], settings: flags.FlagValues):
    self._jobs = jobs
    self._settings = settings
    self.interrupted = False
    self.codes: dict[str, int] = {}

  async def run(self) -> None:
    """Runs all jobs. When cancelled, waits until the running ones have saved and ended."""
    from xmanager import xm, xm_local

    for number in (signal.SIGINT, signal.SIGTERM):
      asyncio.get_running_loop().add_signal_handler(number, asyncio.current_task().cancel)
    slots = asyncio.Semaphore(self._settings.max_parallel)  # XManager would start all at once
    executor = xm_local.Local(experimental_stream_output=False)

    async def run_one(job: sweep.Job) -> None:
      async with slots:
        command = local_command(job, self._settings.max_restarts, self._settings.grace_seconds)
        print(f'{job.model_dir}: started, see supervisor.log there', flush=True)
        unit = await experiment.add(xm.Job(python, executor, args=command[1:]))
        await self._wait(unit, job)

    async with xm_local.create_experiment(self._settings.name) as experiment:
      (python,) = experiment.package(
        [xm.Packageable(xm.Binary(path=sys.executable), xm_local.Local.Spec())]
      )
      async with asyncio.TaskGroup() as group:  # when cancelled, it waits for all of them
        for job in self._jobs:
          group.create_task(run_one(job))

  async def _wait(self, unit: Any, job: sweep.Job) -> None:
    """Waits until the job has ended. When cancelled, stops the job first.

    XManager would end only the shell that started the job, and leave the job running.
    """
    ended = asyncio.ensure_future(unit.wait_until_complete())
    try:
      await asyncio.shield(ended)
    except asyncio.CancelledError:
      if not self.interrupted:
        self.interrupted = True
        print('\nStopping: each job saves a checkpoint first.', flush=True)
      await self._stop(ended, job)
      raise
    finally:
      state = _own_state(job)
      code = state.get('exit_code')
      self.codes[job.name] = FAILED if code is None else code
      print(f'{job.model_dir}: exit code {code}, {state.get("restarts")} restarts', flush=True)

  async def _stop(self, ended: asyncio.Future, job: sweep.Job) -> None:
    told = False
    while not ended.done():
      state = _own_state(job)
      if not told and state and state['exit_code'] is None:
        with contextlib.suppress(ProcessLookupError):
          os.kill(state['pid'], signal.SIGTERM)
        told = True
      await asyncio.sleep(supervise.POLL_SECONDS)


def _own_state(job: sweep.Job) -> dict[str, int | None]:
  """The state of the job's supervisor; empty if it belongs to another launch."""
  state = supervise.read_state(Path(job.model_dir))
  return state if state.get('end_with') == os.getpid() else {}


def launch_local(jobs: Sequence[sweep.Job]) -> int:
  """Runs the jobs and returns the exit code of the launch."""
  from het_plugin import reporting

  local = LocalSweep(jobs, flags.FLAGS)
  with contextlib.suppress(asyncio.CancelledError):
    asyncio.run(local.run())
  if local.interrupted:
    return supervise.PREEMPTED
  rows = [(job.model_dir, str(local.codes[job.name])) for job in jobs]
  print(reporting.aligned([('run', 'exit code'), *rows]))
  return FAILED if any(local.codes.values()) else 0


async def launch_vertex(experiment: Any, jobs: Sequence[sweep.Job]) -> None:
  """Adds one Vertex job per job to an XManager experiment."""
  from xmanager import xm, xm_local

  values = flags.FLAGS
  async with experiment:
    (image,) = experiment.package(
      [xm.Packageable(xm.Container(image_path=values.image), xm_local.Vertex.Spec())]
    )
    for job in jobs:
      requirements = xm.JobRequirements(**vertex_requirements(values.topology))
      executor = xm_local.Vertex(requirements)
      await experiment.add(xm.Job(image, executor, name=job.name or None, args=job.arguments()))


def launch_gke(jobs: Sequence[sweep.Job]) -> None:
  """Applies the JobSets in order.

  Raises:
    OSError: kubectl is missing, or refuses a JobSet; those before it stay applied.
  """
  for index, job in enumerate(jobs):
    document = render.to_yaml(jobset_of(index, job, len(jobs)))
    applied = subprocess.run(['kubectl', 'apply', '-f', '-'], input=document, text=True)
    if applied.returncode:
      raise OSError(f'kubectl apply failed for {job.model_dir}; see its message above')


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  values = flags.FLAGS
  with command_line.one_sentence_errors():
    jobs = sweep.make_jobs(
      values.model_dir,
      values.gin_file,
      values.gin_bindings,
      values.gin_search_paths,
      values.heads,
      values.sweep,
      training_run.given_flags(),
    )
    check(jobs)
    if values.dry_run:
      for index, job in enumerate(jobs):
        print(description(index, job, len(jobs)))
      return
    if values.executor == 'gke':
      launch_gke(jobs)
      return
    if not importlib.util.find_spec('xmanager'):
      raise ValueError(
        f"--executor={values.executor} needs XManager: pip install '.[launch]' (--dry_run does not)"
      )
    logging.getLogger('alembic').setLevel(logging.WARNING)  # migrations of its database
    if values.executor == 'local':
      sys.exit(launch_local(jobs))
    from xmanager import xm_local

    asyncio.run(launch_vertex(xm_local.create_experiment(values.name), jobs))


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
