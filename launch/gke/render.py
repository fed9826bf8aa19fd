"""Prints a JobSet that trains on TPU slices of a GKE cluster.

    python -m launch.gke.render --gin_file=het_plugin/gin/runs/jft4b_vit_l32_het_xl.gin \\
      --name=het-xl --image=REGISTRY/het_plugin:1 --topology=v5e:4x4 --num_slices=2 \\
      --model_dir=gs://BUCKET/het_xl | kubectl apply -f -

Takes the gin files and flags of training; the files must be in the image, which launch/Dockerfile
makes. The cluster needs JobSet 0.6 or newer and a node pool for each slice; docs/launch.md says how
to get both.

Applied again after it ended (kubectl delete jobset NAME first), the run goes on from its newest
checkpoint.
"""

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from absl import app, flags

from het_plugin.config import command_line, train_flags
from launch import slices, sweep
from launch.supervise import PREEMPTED

CONTAINER = 'train'
REPLICATED_JOB = 'slice'
# TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and, in a JobSet of several slices, MEGASCALE_* are set by GKE
# in each container, for jax.distributed.initialize() and libtpu to find the other hosts.
PORTS = (8471, 8080, 8482)  # libtpu within a slice, megascale between slices, JAX's coordinator


@dataclasses.dataclass(frozen=True)
class Settings:
  """What a JobSet is made of, beside the job itself.

  Attributes:
    name: of the JobSet, a DNS label.
    image: container with het_plugin installed.
    topology: 'v5e:4x4', of each slice.
    num_slices: slices, each in a node pool of its own.
    max_restarts: failures that are not preemptions.
    grace_seconds: from SIGTERM to SIGKILL, to save a checkpoint in.
    namespace, service_account, queue: of the cluster; None for its defaults. The queue is Kueue's.
    spot: on Spot VMs.
    privileged: root with all capabilities, see `container`.
    node_selector: further node labels, such as a reservation's.
    env: further environment variables.
  """

  name: str
  image: str
  topology: str
  num_slices: int = 1
  max_restarts: int = 5
  grace_seconds: int = 300
  namespace: str | None = None
  service_account: str | None = None
  queue: str | None = None
  spot: bool = False
  privileged: bool = True
  node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)


def jobset(settings: Settings, job: sweep.Job) -> dict[str, Any]:
  """The JobSet, jobset.x-k8s.io/v1alpha2 (https://jobset.sigs.k8s.io/docs/reference).

  Each slice is a Job with a pod a host. A Job whose pod fails fails at once, and the JobSet then
  recreates all of them, since the others could not go on alone. Preemptions, which are exit code 42
  and evictions of the node, do not count towards max_restarts.

  Raises:
    ValueError: one sentence on a name, topology, folder or number that cannot be.
  """
  one_slice = slices.parse(settings.topology, settings.num_slices)
  _check(settings, job, one_slice)
  metadata = {
    'name': settings.name,
    **({'namespace': settings.namespace} if settings.namespace else {}),
    **({'labels': {'kueue.x-k8s.io/queue-name': settings.queue}} if settings.queue else {}),
    # One slice a node pool, and all of it: hosts of two slices are not wired together.
    'annotations': {'alpha.jobset.sigs.k8s.io/exclusive-topology': 'cloud.google.com/gke-nodepool'},
  }
  return {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': metadata,
    'spec': {
      'failurePolicy': {
        'maxRestarts': settings.max_restarts,
        'rules': [
          {
            'name': 'preempted',
            'action': 'RestartJobSetAndIgnoreMaxRestarts',
            'onJobFailureReasons': ['PodFailurePolicy'],
          }
        ],
      },
      'replicatedJobs': [
        {
          'name': REPLICATED_JOB,
          'replicas': settings.num_slices,
          'template': {'spec': _job_spec(settings, job, one_slice)},
        }
      ],
    },
  }


def _job_spec(settings: Settings, job: sweep.Job, one_slice: slices.Slice) -> dict[str, Any]:
  return {
    'parallelism': one_slice.hosts,
    'completions': one_slice.hosts,
    'backoffLimit': 0,
    # A Job that fails by one of these rules does so with the reason PodFailurePolicy, else with
    # BackoffLimitExceeded.
    'podFailurePolicy': {
      'rules': [
        {
          'action': 'FailJob',
          'onExitCodes': {
            'containerName': CONTAINER,
            'operator': 'In',
            'values': [PREEMPTED],
          },
        },
        {
          'action': 'FailJob',
          'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}],
        },
      ]
    },
    'template': {'spec': _pod_spec(settings, job, one_slice)},
  }


def _pod_spec(settings: Settings, job: sweep.Job, one_slice: slices.Slice) -> dict[str, Any]:
  selector = {
    'cloud.google.com/gke-tpu-accelerator': one_slice.accelerator,
    'cloud.google.com/gke-tpu-topology': one_slice.shape,
  }
  tolerations = [{'key': 'google.com/tpu', 'operator': 'Exists', 'effect': 'NoSchedule'}]
  if settings.spot:
    selector['cloud.google.com/gke-spot'] = 'true'
    tolerations.append(
      {
        'key': 'cloud.google.com/gke-spot',
        'operator': 'Equal',
        'value': 'true',
        'effect': 'NoSchedule',
      }
    )
  return {
    'restartPolicy': 'Never',  # podFailurePolicy demands it
    'hostNetwork': True,  # slices talk over the hosts' network cards
    'dnsPolicy': 'ClusterFirstWithHostNet',
    'terminationGracePeriodSeconds': settings.grace_seconds,
    **({'serviceAccountName': settings.service_account} if settings.service_account else {}),
    'nodeSelector': {**selector, **settings.node_selector},
    'tolerations': tolerations,
    'containers': [container(settings, job)],
  }


def container(settings: Settings, job: sweep.Job) -> dict[str, Any]:
  """The container of each host."""
  # Kubernetes replaces $(NAME) in arguments, and $$( by $(.
  arguments = [argument.replace('$(', '$$(') for argument in job.arguments()]
  # Without a TPU to be had, an error and no training on the CPU.
  env = {'JAX_PLATFORMS': 'tpu,cpu', **settings.env}
  # The driver locks memory beyond the limit of an ordinary container:
  # https://cloud.google.com/kubernetes-engine/docs/how-to/tpus#privileged-mode
  security = {'securityContext': {'privileged': True, 'runAsUser': 0}}
  return {
    'name': CONTAINER,
    'image': settings.image,
    'command': ['python', *sweep.TRAIN],
    'args': [*_slices_binding(settings.num_slices), *arguments],
    'env': [{'name': name, 'value': value} for name, value in env.items()],
    'ports': [{'containerPort': port} for port in PORTS],
    'resources': {'limits': {'google.com/tpu': slices.CHIPS_PER_HOST}},
    **(security if settings.privileged else {}),
  }


def _slices_binding(num_slices: int) -> list[str]:
  """A replica of the parameters for each slice (docs/scale.md), unless the job binds another."""
  return [f'--gin.PjitPartitioner.num_replicas={num_slices}'] if num_slices > 1 else []


def _check(settings: Settings, job: sweep.Job, one_slice: slices.Slice) -> None:
  if not re.fullmatch(r'[a-z]([a-z0-9-]*[a-z0-9])?', settings.name):
    raise ValueError(
      f'--name={settings.name} must be lower-case letters, digits and hyphens, a letter first'
    )
  # What Kubernetes makes of it: NAME-slice-SLICE-HOST-abcde, of at most 63 characters.
  last = f'{settings.name}-{REPLICATED_JOB}-{settings.num_slices - 1}-{one_slice.hosts - 1}-abcde'
  if len(last) > 63:
    raise ValueError(f'--name={settings.name} is {len(last) - 63} characters too long for its pods')
  if not settings.image:
    raise ValueError('--image is empty: name the container image that launch/Dockerfile made')
  if not re.match(r'gs://[a-z0-9]', job.model_dir):
    raise ValueError(
      f'--model_dir={job.model_dir} must be a gs:// folder: a pod that starts again is a new one'
    )
  if settings.max_restarts < 0 or settings.grace_seconds < 1:
    raise ValueError(
      f'--max_restarts={settings.max_restarts} must be at least 0 and '
      f'--grace_seconds={settings.grace_seconds} at least 1'
    )


def to_yaml(document: Mapping[str, Any]) -> str:
  return yaml.safe_dump(document, sort_keys=False, width=100)


def pairs(flag: str, values: Sequence[str]) -> dict[str, str]:
  """{NAME: VALUE} of 'NAME=VALUE's.

  Raises:
    ValueError: one is not of that form.
  """
  found = dict(value.partition('=')[::2] for value in values)
  if not all(found) or any('=' not in value for value in values):
    raise ValueError(f'--{flag}={",".join(values)} must be NAME=VALUE')
  return found


def define_settings_flags() -> None:
  """Flags of a JobSet but for its name and folder, which a sweep has many of."""
  flags.DEFINE_string('image', '', 'Container image with het_plugin installed.')
  flags.DEFINE_string('topology', None, 'Generation and shape in chips of a slice: v5e:4x4.')
  flags.DEFINE_integer('num_slices', 1, 'Slices of that topology.')
  flags.DEFINE_integer(
    'max_restarts', 5, 'Failures that are started again; on GKE, preemptions do not count.'
  )
  flags.DEFINE_integer('grace_seconds', 300, 'Between SIGTERM and SIGKILL.')
  flags.DEFINE_string('namespace', None, 'Namespace of the cluster.')
  flags.DEFINE_string('service_account', None, 'Kubernetes service account that may write gs://.')
  flags.DEFINE_string('queue', None, 'LocalQueue of Kueue.')
  flags.DEFINE_bool('spot', False, 'On Spot VMs.')
  flags.DEFINE_bool('privileged', True, 'As root with all capabilities, which TPU drivers need.')
  flags.DEFINE_multi_string('node_selector', [], 'Further node label, NAME=VALUE; repeatable.')
  flags.DEFINE_multi_string('env', [], 'Environment variable of the pods, NAME=VALUE; repeatable.')


def settings_of_flags(name: str) -> Settings:
  """The flags' settings for a JobSet of this name."""
  values = flags.FLAGS
  if not values.topology:
    raise ValueError('--topology is not given: v5e:4x4, for example')
  return Settings(
    name=name,
    image=values.image,
    topology=values.topology,
    num_slices=values.num_slices,
    max_restarts=values.max_restarts,
    grace_seconds=values.grace_seconds,
    namespace=values.namespace,
    service_account=values.service_account,
    queue=values.queue,
    spot=values.spot,
    privileged=values.privileged,
    node_selector=pairs('node_selector', values.node_selector),
    env=pairs('env', values.env),
  )


def define_flags() -> None:
  command_line.define_flags()
  train_flags.define_flags()
  define_settings_flags()
  flags.DEFINE_string('name', 'het-plugin', 'Name of the JobSet.')
  flags.DEFINE_string('model_dir', '', 'gs:// folder of the run.')
  flags.DEFINE_string('output', None, 'Where the YAML is written; stdout where not given.')


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  with command_line.one_sentence_errors():
    values = flags.FLAGS
    (job,) = sweep.make_jobs(
      values.model_dir,
      values.gin_file,
      values.gin_bindings,
      values.gin_search_paths,
      train_flags=train_flags.given(),
    )
    text = to_yaml(jobset(settings_of_flags(values.name), job))
    if values.output:
      Path(values.output).write_text(text)
    else:
      sys.stdout.write(text)


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
