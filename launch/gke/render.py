"""Prints a JobSet that trains on TPU slices of a GKE cluster.

    python -m launch.gke.render --gin_file=het_plugin/gin/runs/jft4b_vit_l32_het_xl.gin \\
      --name=het-xl --image=REGISTRY/het_plugin:1 --topology=v5e:4x4 --num_slices=2 \\
      --model_dir=gs://BUCKET/het_xl | kubectl apply -f -

Takes the gin files and flags of training. The gin files must be in the image, which
launch/Dockerfile builds. The cluster needs JobSet 0.6 or newer and one node pool per slice;
docs/launch.md shows how to create them. launch/gke/jobset.yaml is the template.

To resume a run that has ended, delete its JobSet (kubectl delete jobset NAME) and apply it again.
"""

import dataclasses
import json
import re
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from absl import app, flags

from het_plugin.config import command_line, training_run
from launch import slices, sweep
from launch.supervise import PREEMPTED

TEMPLATE = Path(__file__).with_name('jobset.yaml')


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of a JobSet beside the job it runs. Each is also a flag.

  Attributes:
    name: name of the JobSet, a DNS label.
    image: container image with het_plugin installed.
    topology: generation and shape of each slice, for example 'v5e:4x4'.
    num_slices: number of slices, each in a node pool of its own.
    max_restarts: number of failures after which the JobSet fails. Preemptions do not count.
    grace_seconds: seconds between SIGTERM and SIGKILL, in which training saves a checkpoint.
    namespace, service_account: of the cluster; None for the defaults.
    queue: LocalQueue of Kueue; None for no queue.
    spot: whether to use Spot VMs.
    privileged: whether the container runs as root with all capabilities.
    node_selector: additional node labels, for example those of a reservation.
    env: additional environment variables.
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
  """Fills launch/gke/jobset.yaml.

  Raises:
    ValueError: a name, topology, folder or number is not possible; one sentence says which.
  """
  tpu_slice = slices.parse(settings.topology, settings.num_slices)
  _check(settings, job, tpu_slice)
  selector = {
    'cloud.google.com/gke-tpu-accelerator': tpu_slice.accelerator,
    'cloud.google.com/gke-tpu-topology': tpu_slice.shape,
  }
  tolerations = [{'key': 'google.com/tpu', 'operator': 'Exists', 'effect': 'NoSchedule'}]
  if settings.spot:
    spot = 'cloud.google.com/gke-spot'
    selector[spot] = 'true'
    tolerations += [{'key': spot, 'operator': 'Equal', 'value': 'true', 'effect': 'NoSchedule'}]
  # With 'tpu,cpu' a pod without its TPU fails. Otherwise JAX would train on the CPU.
  env = {'JAX_PLATFORMS': 'tpu,cpu', **settings.env}
  # TPU drivers lock more memory than an ordinary container may:
  # https://cloud.google.com/kubernetes-engine/docs/how-to/tpus#privileged-mode
  security = {'privileged': True, 'runAsUser': 0} if settings.privileged else None
  # One replica of the parameters per slice (docs/scale.md), unless the job binds another number.
  replicas = [f'--gin.PjitPartitioner.num_replicas={settings.num_slices}']
  arguments = [*(replicas if settings.num_slices > 1 else []), *job.arguments()]
  values = dataclasses.asdict(settings) | {
    'hosts': tpu_slice.hosts,
    'preempted': PREEMPTED,
    'node_selector': {**selector, **settings.node_selector},
    'tolerations': tolerations,
    # Kubernetes expands $(NAME) in arguments and turns $$ into $, so every $ is doubled.
    'args': [argument.replace('$', '$$') for argument in arguments],
    'env': [{'name': name, 'value': value} for name, value in env.items()],
    'chips_per_host': slices.CHIPS_PER_HOST,
    'security': security,
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


def _check(settings: Settings, job: sweep.Job, tpu_slice: slices.Slice) -> None:
  if not re.fullmatch(r'[a-z]([a-z0-9-]*[a-z0-9])?', settings.name):
    raise ValueError(
      f'--name={settings.name} must be lower-case letters, digits and hyphens, a letter first'
    )
  # Kubernetes names the pods NAME-slice-SLICE-HOST-abcde, with at most 63 characters.
  last = f'{settings.name}-slice-{settings.num_slices - 1}-{tpu_slice.hosts - 1}-abcde'
  if len(last) > 63:
    raise ValueError(f'--name={settings.name} is {len(last) - 63} characters too long for its pods')
  if not settings.image:
    raise ValueError('--image is empty: name the container image that launch/Dockerfile built')
  if not re.match(r'gs://[a-z0-9]', job.model_dir):
    raise ValueError(
      f'--model_dir={job.model_dir} must be a gs:// folder: the disk of a pod is lost with the pod'
    )
  if settings.max_restarts < 0 or settings.grace_seconds < 1:
    raise ValueError(
      f'--max_restarts={settings.max_restarts} must be at least 0 and '
      f'--grace_seconds={settings.grace_seconds} at least 1'
    )


def to_yaml(document: Mapping[str, Any]) -> str:
  return yaml.safe_dump(document, sort_keys=False, width=100)


def pairs(flag: str, values: Sequence[str]) -> dict[str, str]:
  """{NAME: VALUE} of 'NAME=VALUE' strings.

  Raises:
    ValueError: a string has another form.
  """
  found = dict(value.partition('=')[::2] for value in values)
  if not all(found) or any('=' not in value for value in values):
    raise ValueError(f'--{flag}={",".join(values)} must be NAME=VALUE')
  return found


def define_settings_flags() -> None:
  """Defines the flags of `Settings`, without --name and --model_dir."""
  flags.DEFINE_string('image', '', 'Container image with het_plugin installed.')
  flags.DEFINE_string('topology', None, 'TPU generation and shape of a slice in chips: v5e:4x4.')
  flags.DEFINE_integer('num_slices', 1, 'Number of slices.')
  flags.DEFINE_integer(
    'max_restarts', 5, 'Number of restarts after failures; on GKE, preemptions do not count.'
  )
  flags.DEFINE_integer('grace_seconds', 300, 'Seconds between SIGTERM and SIGKILL.')
  flags.DEFINE_string('namespace', None, 'Namespace in the cluster.')
  flags.DEFINE_string('service_account', None, 'Kubernetes service account that may write gs://.')
  flags.DEFINE_string('queue', None, 'LocalQueue of Kueue.')
  flags.DEFINE_bool('spot', False, 'Use Spot VMs.')
  flags.DEFINE_bool('privileged', True, 'Run pods as root, which TPU drivers need.')
  flags.DEFINE_multi_string('node_selector', [], 'Additional node label, NAME=VALUE; repeatable.')
  flags.DEFINE_multi_string(
    'env', [], 'Additional environment variable of the pods, NAME=VALUE; repeatable.'
  )


def settings_of_flags(name: str) -> Settings:
  """The settings in the flags, for a JobSet of this name."""
  values = flags.FLAGS
  if not values.topology:
    raise ValueError('--topology is not given: v5e:4x4, for example')
  given = {field.name: values[field.name].value for field in dataclasses.fields(Settings)}
  mappings = {flag: pairs(flag, given[flag]) for flag in ('node_selector', 'env')}
  return Settings(**given | mappings | {'name': name})


def define_flags() -> None:
  command_line.define_flags()
  training_run.define_flags()
  define_settings_flags()
  flags.DEFINE_string('name', 'het-plugin', 'Name of the JobSet.')
  flags.DEFINE_string('model_dir', '', 'gs:// folder of the run.')
  flags.DEFINE_string('output', None, 'File for the YAML; default: stdout.')


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
      train_flags=training_run.given_flags(),
    )
    text = to_yaml(jobset(settings_of_flags(values.name), job))
    if values.output:
      Path(values.output).write_text(text)
    else:
      sys.stdout.write(text)


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
