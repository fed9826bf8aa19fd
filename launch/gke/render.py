"""Prints a JobSet that trains on TPU slices of a GKE cluster.

    python -m launch.gke.render --gin_file=het_plugin/gin/runs/jft4b_vit_l32_het_xl.gin \\
      --name=het-xl --image=REGISTRY/het_plugin:1 --topology=v5e:4x4 --num_slices=2 \\
      --model_dir=gs://BUCKET/het_xl | kubectl apply -f -

Takes the gin files and flags of training. The gin files must be in the image, which
launch/Dockerfile builds. The cluster needs JobSet 0.6 or newer and one node pool per slice; the
comments above the JobSet create the pools. launch/gke/jobset.yaml is the template.

With --plan the run is compiled for the slices first (python -m het_plugin.plan), and a job that
does not fit is not written. With --search, too, it gets the mesh and the microbatches with which
its batch fits.

    --format=jobset    a JobSet (the default), also for Kueue: --queue and --priority
    --format=xpk       the command line of xpk, which makes the JobSet itself
    --format=trainjob  a TrainJob of Kubeflow Trainer, with its runtime jax-distributed: one slice

To resume a run that has ended, delete its JobSet (kubectl delete jobset NAME) and apply it again.
"""

import contextlib
import dataclasses
import json
import re
import shlex
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from het_plugin.cli import command_line
from het_plugin.cli.settings import CommandSettings, Repeated
from het_plugin.commands import train
from het_plugin.planning import report, search, slices, worker
from het_plugin.system.ranges import Count
from launch import sweep
from launch.processes import PREEMPTED

TEMPLATE = Path(__file__).with_name('jobset.yaml')
XPK_PRIORITIES = ('very-low', 'low', 'medium', 'high', 'very-high')
SPOT = 'cloud.google.com/gke-spot'
MAX_NODES = 65_000  # of a cluster, https://cloud.google.com/kubernetes-engine/quotas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pods(CommandSettings):
  """The pods of a run, and the slices that they are on.

  Attributes:
    image: Container image with het_plugin installed.
    topology: TPU generation and shape of a slice in chips: v5e:4x4.
    num_slices: Number of slices.
    chips_per_host: 8 makes a 2x4 slice of v5e or v6e one host; default: two hosts of 4.
    max_restarts: Number of restarts after failures; on GKE, preemptions do not count.
    grace_seconds: Seconds from SIGTERM to SIGKILL.
    namespace: Namespace in the cluster.
    service_account: Kubernetes service account that may write gs://.
    queue: LocalQueue of Kueue.
    priority: WorkloadPriorityClass of Kueue.
    spot: Use Spot VMs.
    privileged: Run privileged pods, as root: TPU drivers need it.
    node_selector: Additional node label, NAME=VALUE; repeatable.
    env: Additional environment variable of the pods, NAME=VALUE; repeatable.
  """

  image: str = ''
  topology: str | None = None
  num_slices: Count = 1
  chips_per_host: int | None = None
  max_restarts: Annotated[int, '[0, inf)'] = 5
  grace_seconds: Count = 300
  namespace: str | None = None
  service_account: str | None = None
  queue: str | None = None
  priority: str | None = None
  spot: bool = False
  privileged: bool = True
  node_selector: Repeated[str] = ()
  env: Repeated[str] = ()


OF_PODS = tuple(Pods.__annotations__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSettings(Pods, train.Settings):
  """What a JobSet runs.

  Attributes:
    name: Name of the JobSet.
    model_dir: gs:// folder of the run.
  """

  name: str = 'het-plugin'
  model_dir: str = ''

  @property
  def job(self) -> sweep.Job:
    """The run."""
    train_flags = sweep.given_flags()
    (job,) = sweep.make_jobs(self.model_dir, *self.gin, train_flags=train_flags)
    return job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(JobSettings):
  """What is printed.

  Attributes:
    output: File for the YAML; default: stdout.
    format: What is printed.
    plan: Compile the run first; write no job that does not fit.
    search: With --plan: write a mesh and microbatches that fit.
  """

  output: str | None = None
  format: Literal['jobset', 'xpk', 'trainjob'] = 'jobset'
  plan: bool = False
  search: bool = False


def hosts_of(settings: Pods) -> slices.Hosts:
  return slices.hosts(settings.topology or '', settings.num_slices, settings.chips_per_host)


def node_selector(settings: Pods) -> dict[str, str]:
  """Labels of the nodes of a slice."""
  hosts = hosts_of(settings)
  selector = {
    'cloud.google.com/gke-tpu-accelerator': hosts.label,
    'cloud.google.com/gke-tpu-topology': hosts.shape,
  }
  if slices.num_chips(hosts.shape) == 8:  # one host or two: both have the labels above
    selector['node.kubernetes.io/instance-type'] = hosts.machine
  if settings.spot:
    selector[SPOT] = 'true'
  return selector | pairs('node_selector', settings.node_selector)


def jobset(name: str, settings: Pods, job: sweep.Job) -> dict[str, Any]:
  """Fills launch/gke/jobset.yaml with settings and what the job runs.

  Raises:
    ValueError: a name, topology, folder or number is not possible; one sentence says which.
  """
  num_slices = settings.num_slices
  hosts = hosts_of(settings)
  _check(name, settings, job, hosts.count)
  tolerations = [{'key': 'google.com/tpu', 'operator': 'Exists', 'effect': 'NoSchedule'}]
  if settings.spot:
    tolerations += [{'key': SPOT, 'operator': 'Equal', 'value': 'true', 'effect': 'NoSchedule'}]
  # With 'tpu,cpu' a pod without its TPU fails. Otherwise JAX would train on the CPU.
  env = {'JAX_PLATFORMS': 'tpu,cpu', **pairs('env', settings.env)}
  # One replica of the parameters per slice (docs/scale.md), unless the job binds another number.
  replicas = [f'--gin.PjitPartitioner.num_replicas={num_slices}']
  arguments = [*(replicas if num_slices > 1 else []), *job.arguments()]
  values = settings.chosen(*OF_PODS) | {
    'name': name,
    'hosts': hosts.count,
    'preempted': PREEMPTED,
    'node_selector': node_selector(settings),
    'tolerations': tolerations,
    # Kubernetes expands $(NAME) in arguments and turns $$ into $, so every $ is doubled.
    'args': [argument.replace('$', '$$') for argument in arguments],
    'env': [{'name': name, 'value': value} for name, value in env.items()],
    'chips_per_host': hosts.chips,
    # TPU drivers lock more memory than an ordinary container may:
    # https://cloud.google.com/kubernetes-engine/docs/how-to/tpus#privileged-mode
    'security': {'privileged': True, 'runAsUser': 0} if settings.privileged else None,
  }
  # JSON is YAML, so values need no quoting of their own.
  text = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
  return _without_nulls(yaml.safe_load(string.Template(TEMPLATE.read_text()).substitute(text)))


def _without_nulls(node: Any) -> Any:
  """A copy without mapping entries that are null or have only such entries."""
  if isinstance(node, list):
    return [_without_nulls(item) for item in node]
  if not isinstance(node, dict):
    return node
  kept = {name: _without_nulls(value) for name, value in node.items()}
  return {name: value for name, value in kept.items() if value is not None and value != {}}


def _check(name: str, settings: Pods, job: sweep.Job, hosts: int) -> None:
  if not re.fullmatch(r'[a-z]([a-z0-9-]*[a-z0-9])?', name):
    raise ValueError(
      f'--name={name} must be lower-case letters, digits and hyphens, a letter first'
    )
  # Kubernetes names the pods NAME-slice-SLICE-HOST-abcde, with at most 63 characters.
  last = f'{name}-slice-{settings.num_slices - 1}-{hosts - 1}-abcde'
  if len(last) > 63:
    raise ValueError(f'--name={name} is {len(last) - 63} characters too long for its pods')
  if (nodes := settings.num_slices * hosts) > MAX_NODES:
    raise ValueError(
      f'--num_slices={settings.num_slices} takes {nodes} nodes; a cluster has at most {MAX_NODES}'
    )
  texts = job.arguments()
  for flag, value in settings.chosen(*OF_PODS).items():
    values = [value] if isinstance(value, str) else value if isinstance(value, tuple) else []
    texts += [f'--{flag}={text}' for text in values]
  if unprintable := [text for text in texts if not text.isprintable()]:
    raise ValueError(f'{unprintable[0]!r} has a control character or a line break')
  if not settings.image:
    raise ValueError('--image is empty: name the container image that launch/Dockerfile built')
  if not re.match(r'gs://[a-z0-9]', job.model_dir):
    raise ValueError(
      f'--model_dir={job.model_dir} must be a gs:// folder, its bucket in lower case: the disk of '
      'a pod is lost with the pod'
    )


def node_pools(name: str, settings: Pods) -> list[str]:
  """Commands that create the node pools of the JobSet, one per slice."""
  hosts = hosts_of(settings)
  commands = []
  placement = []
  if hosts.count > 1:
    placement = [f'--tpu-topology={hosts.shape}']
    if slices.GENERATIONS[hosts.generation].placement_policy:
      commands.append(
        f'gcloud compute resource-policies create workload-policy {name} --region=REGION '
        f'--type=HIGH_THROUGHPUT --accelerator-topology={hosts.shape}'
      )
      placement = [f'--placement-policy={name}']
  options = [f'--machine-type={hosts.machine}', f'--num-nodes={hosts.count}', *placement]
  if settings.spot:
    options.append('--spot')
  return commands + [
    f'gcloud container node-pools create {name}-{index} --cluster=CLUSTER --location=REGION '
    f'--node-locations=ZONE {" ".join(options)}'
    for index in range(settings.num_slices)
  ]


def xpk_command(name: str, settings: Pods, job: sweep.Job) -> str:
  """The command line of xpk for the JobSet; xpk restarts after exit code 42 by itself.

  Raises:
    ValueError: as in `jobset`, or xpk cannot be asked for one of the settings, such as the service
      account, which is the default one of the namespace.
  """
  spec = jobset(name, settings, job)['spec']['replicatedJobs'][0]['template']['spec']
  container = spec['template']['spec']['containers'][0]
  for unknown in ('service_account', 'queue', 'node_selector', 'chips_per_host'):
    if getattr(settings, unknown):
      raise ValueError(f'--{unknown} is for --format=jobset: xpk has its own')
  if not settings.privileged:
    raise ValueError('--privileged=false is for --format=jobset: the pods of xpk are privileged')
  if settings.priority not in (None, *XPK_PRIORITIES):
    raise ValueError(
      f'--priority={settings.priority} must be one of {", ".join(XPK_PRIORITIES)} with xpk'
    )
  hosts = hosts_of(settings)
  options = {
    'cluster': 'CLUSTER',
    'workload': name,
    'tpu-type': slices.xpk_type(hosts.generation, hosts.shape),
    'num-slices': settings.num_slices,
    'docker-image': settings.image,
    'max-restarts': settings.max_restarts,
    'termination-grace-period-seconds': settings.grace_seconds,
    'priority': settings.priority,
    'namespace': settings.namespace,
    'command': shlex.join(
      [*container['command'], *(x.replace('$$', '$') for x in container['args'])]
    ),
  }
  words = ['xpk', 'workload', 'create']
  words += [f'--{flag}={value}' for flag, value in options.items() if value is not None]
  words += [f'--env={x["name"]}={x["value"]}' for x in container['env']]
  words += ['--spot'] if settings.spot else []
  return shlex.join(words) + '\n'


def train_job(name: str, settings: Pods, job: sweep.Job) -> dict[str, Any]:
  """The TrainJob of Kubeflow Trainer 2.3 or newer for the JobSet.

  Its runtime jax-distributed sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
  Whether a preempted job starts again is a setting of the runtime.

  Raises:
    ValueError: as in `jobset`, or there are several slices.
  """
  if settings.num_slices > 1:
    raise ValueError(
      f'--num_slices={settings.num_slices}: a TrainJob has one slice; use --format=jobset'
    )
  document = jobset(name, settings, job)
  spec = document['spec']['replicatedJobs'][0]['template']['spec']
  pod = spec['template']['spec']
  container = pod['containers'][0]
  placed = (
    'nodeSelector',
    'tolerations',
    'serviceAccountName',
    'terminationGracePeriodSeconds',
  )
  patch = {key: pod[key] for key in placed if key in pod}
  if security := container.get('securityContext'):
    patch['containers'] = [{'name': 'node', 'securityContext': security}]
  trainer = {key: container[key] for key in ('image', 'command', 'args', 'env')}
  trainer |= {'numNodes': spec['parallelism'], 'resourcesPerNode': container['resources']}
  kept = ('name', 'namespace', 'labels')
  return {
    'apiVersion': 'trainer.kubeflow.org/v1alpha1',
    'kind': 'TrainJob',
    'metadata': {key: x for key, x in document['metadata'].items() if key in kept},
    'spec': {
      'runtimeRef': {'name': 'jax-distributed'},
      'trainer': trainer,
      'runtimePatches': [
        {
          'manager': 'het-plugin.launch/render',
          'trainingRuntimeSpec': {
            'template': {
              'spec': {
                'replicatedJobs': [
                  {'name': 'node', 'template': {'spec': {'template': {'spec': patch}}}}
                ]
              }
            }
          },
        }
      ],
    },
  }


def planned(settings: Pods, job: sweep.Job, is_searched: bool) -> tuple[sweep.Job, str]:
  """Compiles the run of a job for its slices.

  Returns:
    The job, which has a fitting mesh and microbatches if they are searched; and a line about it.

  Raises:
    ValueError: the run does not fit, or a setting is wrong.
  """
  topology = settings.topology
  bindings = list(job.gin_bindings)
  request = worker.Request(
    job.gin_files, bindings, job.gin_search_paths, topology, num_slices=settings.num_slices
  )
  plan = worker.compile_in_process(request)
  if is_searched:
    found = search.layout(request, plan)
    if found is None:
      raise ValueError(f'--topology={topology}: batch {plan["batch_size"]} fits with no mesh')
    bindings += found.bindings
    job = dataclasses.replace(job, gin_bindings=tuple(bindings))
    plan = worker.compile_in_process(dataclasses.replace(request, gin_bindings=bindings))
  if not plan['fits']:
    raise ValueError(f'--topology={topology}: {" ".join(report.verdict(plan).split())}')
  mesh = ' x '.join(f'{name} {size}' for name, size in plan['mesh'].items())
  return job, f'mesh {mesh}, {plan["num_microbatches"]} microbatches, {report.line(plan)}'


def to_yaml(document: Mapping[str, Any]) -> str:
  return yaml.safe_dump(document, sort_keys=False, width=100)


def pairs(flag: str, values: Sequence[str]) -> dict[str, str]:
  """{NAME: VALUE} of 'NAME=VALUE' strings; another form is a ValueError."""
  found = dict(value.partition('=')[::2] for value in values)
  if not all(found) or len(found) < len(values) or any('=' not in value for value in values):
    raise ValueError(f'--{flag}={",".join(values)} must be NAME=VALUE, each name once')
  return found


RENDERERS = {
  'jobset': lambda *job: to_yaml(jobset(*job)),
  'xpk': xpk_command,
  'trainjob': lambda *job: to_yaml(train_job(*job)),
}


def run(settings: Settings) -> None:
  """Prints or writes the job."""
  job = settings.job
  name = settings.name
  lines = []
  if settings.search and not settings.plan:
    raise ValueError('--search has an effect only with --plan')
  if settings.format == 'trainjob':
    settings.refuse(['max_restarts'], 'a TrainJob: its runtime has a setting')
  if settings.plan:
    jobset(name, settings, job)  # refuses wrong settings before it compiles
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the job's
      job, line = planned(settings, job, settings.search)
    lines.append(f'plan: {line}')
  lines += node_pools(name, settings) if settings.format != 'xpk' else []
  comments = ''.join(f'# {line}\n' for line in lines)
  text = f'{comments}{RENDERERS[settings.format](name, settings, job)}'
  if settings.output:
    Path(settings.output).write_text(text)
  else:
    sys.stdout.write(text)


if __name__ == '__main__':
  command_line.run_command(sys.modules[__name__])
