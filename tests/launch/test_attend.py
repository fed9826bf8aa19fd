"""Waiting for JobSets, with a kubectl that keeps them in a folder, and with the real one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from het_plugin.cli import command_line
from launch import supervise
from launch.gke import attend
from tests.launch import kubernetes_api
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
KUBECTL = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
words = [word for word in sys.argv[1:] if not word.startswith('--namespace')]
with (folder / 'calls').open('a') as calls:
  print(*words, file=calls)
jobset = folder / 'jobset.yaml'
if words[:2] == ['get', 'nodes']:
  print((folder / 'nodes.json').read_text())
elif words[0] == 'apply':
  jobset.write_text(sys.stdin.read())
elif words[0] == 'delete':
  jobset.unlink(missing_ok=True)
elif not jobset.exists():
  sys.exit('Error from server (NotFound): no jobset')
else:
  state = folder / 'state'
  print(json.dumps({{'status': json.loads(state.read_text()) if state.exists() else {{}}}}))
"""
JOB = ['--gin_file=gin/runs/digits_smoke.gin', '--image=r/i:1', '--model_dir=gs://bucket/run']
JOB += ['--topology=v5e:4x4', '--name=birds']


def node(pool, ready='True', **spec):
  return {
    'metadata': {'labels': {'cloud.google.com/gke-nodepool': pool}},
    'spec': spec,
    'status': {'conditions': [{'type': 'Ready', 'status': ready}]},
  }


@pytest.fixture
def cluster(tmp_path, monkeypatch):
  """Two slices of four hosts; a third lacks a host, and of a fourth one is drained."""
  kubectl = tmp_path / 'bin' / 'kubectl'
  kubectl.parent.mkdir()
  kubectl.write_text(KUBECTL.format(python=sys.executable, folder=str(tmp_path)))
  kubectl.chmod(0o755)
  monkeypatch.setenv('PATH', f'{kubectl.parent}:{os.environ["PATH"]}')
  nodes = [node(pool) for pool in ('a', 'b', 'c') for _ in range(4)]
  nodes[-1] = node('c', ready='Unknown')
  nodes += [node('d'), node('d'), node('d'), node('d', unschedulable=True)]
  (tmp_path / 'nodes.json').write_text(json.dumps({'items': nodes}))
  return tmp_path


def test_a_slice_counts_when_all_of_its_hosts_are_ready(cluster, run_main):
  assert run_main(attend, '--count', '--topology=v5e:4x4', '--spot') == '2\n'
  call = (cluster / 'calls').read_text()
  assert '--selector=cloud.google.com/gke-tpu-accelerator=tpu-v5-lite-podslice,' in call
  assert 'gke-tpu-topology=4x4' in call and 'gke-spot=true' in call
  assert run_main(attend, '--count', '--topology=v5e:1x1') == '14\n'


@pytest.mark.parametrize('state, code', [('Completed', 0), ('Failed', 1)])
def test_the_end_of_a_jobset_has_a_code(cluster, parsed_flags, monkeypatch, state, code):
  monkeypatch.setattr(attend, 'POLL_SECONDS', 0)
  monkeypatch.setattr(attend.processes, 'on_signals', lambda handler: None)
  (cluster / 'state').write_text(json.dumps({'terminalState': state}))
  with parsed_flags(attend, *JOB, '--namespace=team') as argv, pytest.raises(SystemExit) as ended:
    command_line.call_command(attend, argv)
  assert ended.value.code == code
  assert yaml.safe_load((cluster / 'jobset.yaml').read_text())['metadata']['name'] == 'birds'
  calls = [line.split()[0] for line in (cluster / 'calls').read_text().splitlines()]
  assert calls == ['delete', 'apply', 'get']


@pytest.mark.slow
def test_a_run_takes_the_slices_that_are_left(cluster):
  module = [sys.executable, '-m', 'launch.gke.attend']
  count = ' '.join([*module, '--count', '--topology=v5e:4x4'])
  command = [sys.executable, '-m', 'launch.supervise', f'--folder={cluster}', '--poll_seconds=0.1']
  command += [f'--available={count}', '--', *module, *JOB, '--num_slices={n}']
  process = subprocess.Popen(command, cwd=ROOT)

  def replicas():
    jobset = cluster / 'jobset.yaml'
    found = re.search(r'replicas: (\d)\n', jobset.read_text()) if jobset.exists() else None
    return found and int(found[1])

  try:
    wait_for(lambda: replicas() == 2)
    nodes = [node('b') for _ in range(4)]
    (cluster / 'nodes.json').write_text(json.dumps({'items': nodes}))
    wait_for(lambda: replicas() == 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 42
  finally:
    process.kill()
  assert not (cluster / 'jobset.yaml').exists()
  assert supervise.read_state(cluster)['restarts'] == 0


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('kubectl'), reason='kubectl is not installed')
def test_the_real_kubectl_does_the_same(tmp_path, monkeypatch, run_main):
  """With an API of our own: two slices are counted, a signal waits for the pods."""
  labels = {'gke-tpu-accelerator': 'tpu-v5-lite-podslice', 'gke-tpu-topology': '4x4'}
  nodes = [node(pool) for pool in ('a', 'b') for _ in range(4)]
  for i, x in enumerate(nodes):
    x['metadata']['name'] = f'node-{i}'
    x['metadata']['labels'] |= {f'cloud.google.com/{name}': y for name, y in labels.items()}
  server = kubernetes_api.Server(nodes)
  server.write_kubeconfig(tmp_path / 'config')
  monkeypatch.setenv('KUBECONFIG', str(tmp_path / 'config'))
  monkeypatch.setenv('HOME', str(tmp_path))
  threading.Thread(target=server.serve_forever, daemon=True).start()
  command = [sys.executable, '-m', 'launch.gke.attend', *JOB, '--num_slices=2']
  process = None
  try:
    assert run_main(attend, '--count', '--topology=v5e:4x4') == '2\n'
    process = subprocess.Popen(command, cwd=ROOT)
    wait_for(lambda: server.jobsets)
    (job,) = server.jobsets['birds']['spec']['replicatedJobs']
    assert job['replicas'] == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 42
    assert not server.jobsets
  finally:
    server.shutdown()
    server.server_close()
    if process is not None:
      process.kill()
  assert any(x.startswith('POST') and 'fieldValidation=Strict' in x for x in server.requests)
