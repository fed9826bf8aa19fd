"""Launches a training run, or a sweep of them.

    python -m launch.xm_launch --gin_file=gin/runs/digits_smoke.gin --model_dir=runs/sweep \\
      --heads=det,het_xl --sweep=RANDOM_SEED=0,1 --sweep=LEARNING_RATE=1e-3,3e-3 --dry_run

Takes the gin files and flags of training.

    --executor=local   runs jobs as processes of this machine, at most --max_parallel at a time, and
                       restarts those that were preempted (exit code 42) or killed. Ctrl-C lets all
                       running jobs save and stop. Ends with a table of exit codes and metrics.
    --executor=gke     applies one JobSet per job with kubectl (launch/gke/render.py).

Those of XManager (pip install '.[launch]') restart nothing:

    --executor=vertex      runs jobs on TPU v2 or v3, the only TPUs of XManager's Vertex executor.
    --executor=kubernetes  runs jobs on one host, on GPUs (--resources=a100=8): for a job with TPUs
                           it requests none.
    --executor=cloud       sends jobs to XManager on Cloud, whose server is a preview, on one slice
                           (--topology) or on GPUs (--resources).

Repeating a launch resumes its jobs; on GKE, delete the JobSets that have ended first. --dry_run
prints all jobs.

Exit codes: 0 all jobs are done, or were submitted; 1 a job failed; 2 a setting is wrong; 42 the
launch was interrupted.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.util
import math
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal

from het_plugin import reporting
from het_plugin.cli import command_line
from het_plugin.cli.settings import Repeated
from het_plugin.commands import train
from het_plugin.config import parsing
from het_plugin.planning import slices
from het_plugin.system.ranges import Count
from launch import processes, sweep
from launch.gke import render

# The flags of each executor, beside the name, the folder and what the jobs are.
USED = {
  'local': ('max_parallel', 'max_restarts', 'grace_seconds'),
  'vertex': ('image', 'topology'),
  'kubernetes': ('image', 'resources'),
  'cloud': ('image', 'topology', 'resources', 'queue', 'service_account'),
  'gke': render.OF_PODS,
}
# What the executors of XManager 0.8.5 can ask for. Its Kubernetes executor selects nodes by
# 'nvidia-tesla-NAME', which GKE has for these; XManager on Cloud calls tpu7x by a machine type.
GPUS = {
  'kubernetes': ('p4', 't4', 'p100', 'v100', 'a100'),
  'cloud': (
    *('p4', 't4', 'l4_24th', 'p100', 'v100', 'a100', 'a100_80gib', 'h100', 'h200'),
    *('b200', 'b300', 'gb200', 'gb300', 'b40_48th'),
  ),
}
CLOUD_TPUS = ('v4', 'v5e', 'v5p', 'v6e')
XMANAGER = {
  'vertex': 'xm_local.Vertex',
  'kubernetes': 'xm_local.Kubernetes',
  'cloud': 'xm_cloud.KubernetesJobExecutor',
}
_JOB_NAME = 20  # characters of a job's name in that of its JobSet
VERTEX_CORES_PER_CHIP = 2  # XManager counts cores: tpu_v3=8 is a 2x2
FAILED = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(render.Pods, train.Settings):
  """What is launched, and where.

  Attributes:
    executor: Where the jobs run.
    name: Name of the experiment and of JobSets.
    model_dir: Folder of the run; with a sweep, jobs have sub-folders.
    heads: Names of gin/heads/*.gin, one job each.
    sweep: NAME=VALUE,VALUE,... with NAME and VALUE as in --gin.NAME=VALUE; repeatable.
    max_parallel: Number of local jobs at a time.
    resources: XManager's names and amounts: a100=8, or cpu=16,ram=64e9 (bytes).
    dry_run: Print all jobs and launch none.
  """

  executor: Literal['local', 'vertex', 'kubernetes', 'cloud', 'gke'] = 'local'
  name: str = 'het-plugin'
  model_dir: str = ''
  heads: tuple[str, ...] = ()
  sweep: Repeated[str] = ()
  max_parallel: Count = 1
  resources: tuple[str, ...] = ()
  dry_run: bool = False

  def __post_init__(self):
    for name in (*render.OF_PODS, 'max_parallel', 'resources'):
      if name not in USED[self.executor]:
        users = ', '.join(x for x in USED if name in USED[x])
        self.refuse([name], f'--executor={self.executor}: it is for {users}', 'has no effect with')

  @classmethod
  def define_flags(cls) -> None:
    super().define_flags()
    if importlib.util.find_spec('xmanager'):
      from xmanager import xm_flags  # noqa: F401 (defines --xm_...)


def local_command(settings: Settings, job: sweep.Job) -> list[str]:
  """Training under a supervisor, which lets it save and stop when this process ends."""
  return [
    sys.executable,
    '-m',
    'launch.supervise',
    f'--folder={job.model_dir}',
    f'--max_restarts={settings.max_restarts}',
    f'--max_failures={settings.max_restarts}',
    f'--grace_seconds={settings.grace_seconds}',
    '--',
    sys.executable,
    *sweep.TRAIN,
    *job.arguments(),
  ]


def requirements(settings: Settings) -> dict[str, float | str]:
  """The arguments of xm.JobRequirements for an executor of XManager.

  Raises:
    ValueError: the executor cannot ask for them.
  """
  executor = settings.executor
  name = settings.topology or ''
  generation = name.partition(':')[0]
  if executor == 'vertex':
    if generation not in ('v2', 'v3'):
      raise ValueError(
        f'--topology={name}: XManager on Vertex supports TPU v2 and v3 only, such as v3:2x2; use '
        '--executor=gke or launch/tpu_vm.sh'
      )
    generation, shape = slices.parse(name)
    return {f'tpu_{generation}': slices.num_chips(shape) * VERTEX_CORES_PER_CHIP}
  asked = render.pairs('resources', settings.resources)
  if bool(asked) == bool(name):
    examples = '--topology=v6e:4x4 or --resources=a100=8'
    if executor == 'kubernetes':
      examples = '--resources=a100=8'
    raise ValueError(f'--executor={executor} needs {examples}, for example')
  if name:
    if generation not in CLOUD_TPUS:
      raise ValueError(
        f'--topology={name}: XManager on Cloud has TPUs of {", ".join(CLOUD_TPUS)}; use '
        '--executor=gke'
      )
    return {f'tpu_{generation}': slices.parse(name)[1]}
  known = *GPUS[executor], 'cpu', 'ram'
  if unknown := [x for x in asked if x not in known]:
    raise ValueError(
      f'--resources={unknown[0]}={asked[unknown[0]]}: {XMANAGER[executor]} has '
      f'{", ".join(known)} only'
    )
  gpus = [x for x in asked if x in GPUS[executor]]
  is_whole = len(asked) == 1 if gpus else {*asked} == {'cpu', 'ram'}
  if len(gpus) > 1 or (executor == 'cloud' and not is_whole):
    kind = 'one GPU, or cpu and ram' if executor == 'cloud' else 'at most one GPU'
    raise ValueError(f'--resources={",".join(settings.resources)} must have {kind}')
  return {name: _amount(name, value) for name, value in asked.items()}


def _amount(name: str, value: str) -> float:
  try:
    amount = float(value)
  except ValueError:
    amount = 0.0
  if not 0 < amount < math.inf:
    raise ValueError(f'--resources={name}={value} must be a number above 0')
  return amount


def kubernetes_name(job: sweep.Job) -> str:
  """The name of a job of a sweep in Kubernetes, '' if there is no sweep.

  It is the same in a longer sweep. What it cannot have gives way to a hash of it.
  """
  short = re.sub('[^a-z0-9]+', '-', job.name.lower()).strip('-')[:_JOB_NAME]
  if short != job.name:
    short = f'{short}-{hashlib.sha256(job.name.encode()).hexdigest()[:6]}'
  return short


def jobset_of(settings: Settings, job: sweep.Job) -> dict[str, Any]:
  """The JobSet of a job, called NAME, or NAME-JOB in a sweep."""
  name = '-'.join(filter(None, [settings.name, kubernetes_name(job)]))
  return render.jobset(name, settings, job)


def check_heads(names: Sequence[str]) -> None:
  """Raises ValueError if there is no gin/heads/NAME.gin."""
  known = sorted(path.stem for path in (parsing.gin_root() / 'heads').glob('*.gin'))
  if unknown := [name for name in names if name not in known]:
    raise ValueError(f'--heads={unknown[0]} is unknown: choose from {", ".join(known)}')


def description(settings: Settings, index: int, job: sweep.Job, num_jobs: int) -> str:
  """The text of --dry_run for a job.

  Raises:
    ValueError: the job cannot be launched as the flags say.
  """
  remote = settings.model_dir.startswith('gs://')
  lines = [f'[{index + 1}/{num_jobs}] {job.name or settings.name}']
  if settings.executor == 'local':
    if remote:
      raise ValueError(
        f'--model_dir={settings.model_dir} must be a local folder: --executor=local keeps logs in '
        'it'
      )
    lines += ['executor: local', f'command: {shlex.join(local_command(settings, job))}']
  elif settings.executor == 'gke':
    lines.append(f'executor: JobSet, {settings.num_slices} x {settings.topology}')
    lines += render.to_yaml(jobset_of(settings, job)).rstrip().splitlines()
  else:
    lines += [f'executor: {XMANAGER[settings.executor]}, {requirements(settings)}']
    if not remote or not settings.image:
      raise ValueError(
        f'--executor={settings.executor} needs --model_dir=gs://... and --image, not '
        f'{settings.model_dir!r} and {settings.image!r}'
      )
    if settings.executor == 'cloud':
      if not settings.queue:
        raise ValueError('--executor=cloud needs --queue: the queue that XManager takes has CPUs')
      lines += [f'queue: {settings.queue}']
    lines += [f'image: {settings.image}', f'arguments: {shlex.join(job.arguments())}']
  return '\n  '.join(lines)


def launch_local(settings: Settings, jobs: Sequence[sweep.Job]) -> int:
  """Runs the jobs, --max_parallel at a time, and returns the exit code of the launch."""
  running: set[subprocess.Popen] = set()
  stopping = False

  def stop(*_) -> None:
    nonlocal stopping
    stopping = True
    for process in list(running):
      process.send_signal(signal.SIGTERM)
    say('\nStopping: each job saves a checkpoint first.')

  def say(line: str) -> None:
    with contextlib.suppress(OSError):  # the reader has gone: Ctrl-C ends `| tee`, too
      print(f'{line}\n', end='', flush=True)  # at once, beside the lines of other jobs

  def run(job: sweep.Job) -> int:
    if stopping:
      return processes.PREEMPTED
    say(f'{job.model_dir}: started, see supervisor.log there')
    # In a session of its own Ctrl-C does not reach it, which would be a second signal.
    process = subprocess.Popen(
      local_command(settings, job), start_new_session=True, preexec_fn=processes.die_with_parent
    )
    running.add(process)
    if stopping:  # the signal came in between
      process.send_signal(signal.SIGTERM)
    code = processes.exit_code(process.wait())
    running.discard(process)
    say(f'{job.model_dir}: exit code {code}')
    return code

  processes.on_signals(stop)
  with concurrent.futures.ThreadPoolExecutor(settings.max_parallel) as pool:
    codes = list(pool.map(run, jobs))
  say(reporting.aligned(sweep.results([job.model_dir for job in jobs], codes)))
  return processes.PREEMPTED if stopping else FAILED if any(codes) else 0


async def launch_in_xmanager(
  settings: Settings, experiment: Any, jobs: Sequence[sweep.Job]
) -> None:
  """Adds one Vertex or Kubernetes job per job to an XManager experiment of xm_local."""
  from xmanager import xm, xm_local

  kind = {'vertex': xm_local.Vertex, 'kubernetes': xm_local.Kubernetes}[settings.executor]
  async with experiment:
    (image,) = experiment.package(
      [xm.Packageable(xm.Container(image_path=settings.image), kind.Spec())]
    )
    for job in jobs:
      executor = kind(xm.JobRequirements(**requirements(settings)))
      name = kubernetes_name(job) or None
      await experiment.add(xm.Job(image, executor, name=name, args=job.arguments()))


async def launch_on_cloud(settings: Settings, experiment: Any, jobs: Sequence[sweep.Job]) -> None:
  """Adds one work unit per job to an experiment of XManager on Cloud."""
  from xmanager import xm, xm_cloud
  from xmanager.xm_local import executables

  constraints = xm_cloud.SchedulingConstraints(queue_name=settings.queue)
  async with experiment:
    for job in jobs:
      image = executables.GoogleContainerRegistryImage(name='train', image_path=settings.image)
      # The client turns `args` into a mapping, which has no order and no flag twice. Attributes
      # with the names of its ExecutableSpec it takes as they are.
      image.args_list = job.arguments()  # ty: ignore[unresolved-attribute]
      executor = xm_cloud.KubernetesJobExecutor(
        xm.JobRequirements(**requirements(settings)), service_account=settings.service_account
      )
      unit = xm_cloud.WorkUnitSettings(scheduling_constraints=constraints, notes=job.name or None)
      await experiment.add(xm.Job(image, executor, name='train'), settings=unit)


def launch_gke(settings: Settings, jobs: Sequence[sweep.Job]) -> None:
  """Applies the JobSets in order; those before one that kubectl refuses stay applied."""
  for job in jobs:
    document = render.to_yaml(jobset_of(settings, job))
    applied = subprocess.run(['kubectl', 'apply', '-f', '-'], input=document, text=True)
    if applied.returncode:
      raise OSError(f'kubectl apply failed for {job.model_dir}; see its message above')


def run(settings: Settings) -> None:
  """Launches all jobs, or prints them."""
  jobs = sweep.make_jobs(
    settings.model_dir,
    *settings.gin,
    settings.heads,
    settings.sweep,
    sweep.given_flags(),
  )
  check_heads(settings.heads)
  described = [description(settings, index, job, len(jobs)) for index, job in enumerate(jobs)]
  if settings.dry_run:
    print(*described, sep='\n')
  elif settings.executor == 'gke':
    launch_gke(settings, jobs)
  elif settings.executor == 'local':
    sys.exit(launch_local(settings, jobs))
  elif not importlib.util.find_spec('xmanager'):
    raise ValueError(f"--executor={settings.executor} needs XManager: pip install '.[launch]'")
  elif settings.executor == 'cloud':
    from xmanager import xm_cloud

    asyncio.run(launch_on_cloud(settings, xm_cloud.create_experiment(settings.name), jobs))
  else:
    from xmanager import xm_local

    asyncio.run(launch_in_xmanager(settings, xm_local.create_experiment(settings.name), jobs))


if __name__ == '__main__':
  command_line.run_command(sys.modules[__name__])
