"""Applies the JobSet of a run with kubectl and waits for its end; with supervise, on any slices.

    python -m launch.supervise --folder=birds \\
      --available='python -m launch.gke.attend --count --topology=v5e:4x4' -- \\
      python -m launch.gke.attend --num_slices={n} --topology=v5e:4x4 --name=birds ...

Takes the flags of a JobSet of launch.gke.render. A JobSet of the same name is deleted first, so
that the run saves and goes on. SIGTERM and Ctrl-C delete the JobSet, and end this command when all
its pods have saved. --count prints the number of slices whose nodes are all ready instead.

Exit codes: 0 the JobSet is complete; 42 it was deleted after a signal; 1 it has failed; 2 a setting
is wrong, or kubectl refuses the JobSet.
"""

import collections
import dataclasses
import json
import subprocess
import sys
import threading

from het_plugin.cli import command_line
from launch import processes
from launch.gke import render

POLL_SECONDS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(render.JobSettings):
  """What is applied.

  Attributes:
    count: Print the number of slices that are ready.
  """

  count: bool = False


def kubectl(namespace: str | None, *arguments: str, text: str | None = None) -> str:
  """Output of kubectl; ValueError with its last line on stderr if it fails."""
  place = [] if namespace is None else [f'--namespace={namespace}']
  done = subprocess.run(
    ['kubectl', *place, *arguments], input=text, capture_output=True, text=True, check=False
  )
  if done.returncode:
    reason = done.stderr.strip().splitlines() or [f'exit code {done.returncode}']
    raise ValueError(f'kubectl {arguments[0]}: {reason[-1]}')
  return done.stdout


def num_slices(settings: render.Pods) -> int:
  """Slices in the cluster whose nodes are all ready and take pods.

  A slice of several hosts is a node pool.
  """
  labels = ','.join(f'{name}={value}' for name, value in render.node_selector(settings).items())
  nodes = json.loads(kubectl(None, 'get', 'nodes', f'--selector={labels}', '--output=json'))
  ready = collections.Counter()
  for node in nodes['items']:
    states = {x['type']: x['status'] for x in node['status']['conditions']}
    if states.get('Ready') == 'True' and not node['spec'].get('unschedulable'):
      ready[node['metadata']['labels']['cloud.google.com/gke-nodepool']] += 1
  return sum(count // render.hosts_of(settings).count for count in ready.values())


def attend(settings: Settings) -> int:
  """Applies the JobSet and waits for its end; returns the exit code."""
  document = render.jobset(settings.name, settings, settings.job)
  stopped = threading.Event()
  processes.on_signals(lambda *_: stopped.set())
  name = settings.name
  namespace = settings.namespace
  # In the foreground, a deletion waits for the pods, which save.
  delete = 'delete', 'jobset', name, '--ignore-not-found', '--cascade=foreground', '--wait'
  kubectl(namespace, *delete)
  kubectl(namespace, 'apply', '--filename=-', text=render.to_yaml(document))
  while not stopped.wait(POLL_SECONDS):
    try:
      status = json.loads(kubectl(namespace, 'get', 'jobset', name, '--output=json'))['status']
    except (ValueError, KeyError) as error:  # the server cannot be reached, or has not begun
      print(f'[attend] {error}', file=sys.stderr, flush=True)
      continue
    if state := status.get('terminalState'):
      return 0 if state == 'Completed' else 1
  kubectl(namespace, *delete)
  return processes.PREEMPTED


def run(settings: Settings) -> None:
  """Applies the JobSet and waits, or counts slices."""
  if settings.count:
    print(num_slices(settings))
    return
  sys.exit(attend(settings))


if __name__ == '__main__':
  command_line.run_command(sys.modules[__name__])
