"""Launches: what --dry_run prints, and real ones if XManager is installed."""

import asyncio
import concurrent.futures
import functools
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launch import sweep, xm_launch

ROOT = Path(__file__).parents[2]
XMANAGER = importlib.util.find_spec('xmanager') is not None
needs_xmanager = pytest.mark.skipif(
  not XMANAGER, reason="XManager is not installed: pip install '.[launch]'"
)
RUN = ['--gin_file=gin/runs/digits_smoke.gin', '--gin.EVAL_STEPS=1', '--gin.WARMUP_STEPS=0']
TINY = ['--gin.vit.depth=1', '--gin.vit.width=16', '--gin.vit.mlp_dim=16', '--gin.BATCH_SIZE=16']
REMOTE = ['--image=i', '--model_dir=gs://b/x']
GKE = ['--executor=gke', '--image=i', '--topology=v5e:4x4', '--model_dir=gs://b/x']


def environment(home):
  """XManager keeps its database in HOME."""
  return {**os.environ, 'HOME': str(home), 'JAX_PLATFORMS': 'cpu'}


def launch(tmp_path, *arguments):
  command = [sys.executable, '-m', 'launch.xm_launch', *RUN, *arguments]
  return subprocess.run(
    command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True
  )


@pytest.fixture
def dry_run(run_main):
  """Prints the jobs of a launch, in this process."""
  return functools.partial(run_main, xm_launch, *RUN, '--dry_run')


def test_a_dry_run_prints_every_local_job_and_starts_none(tmp_path, dry_run):
  printed = dry_run(
    f'--model_dir={tmp_path}/sweep',
    '--heads=det,het_xl',
    '--sweep=RANDOM_SEED=0,1',
    "--gin.NAME='a b'",
  )
  commands = [
    shlex.split(line.partition(': ')[2])
    for line in printed.splitlines()
    if line.startswith('  command: ')
  ]
  assert len(commands) == 4
  assert commands[0][:3] == [sys.executable, '-m', 'launch.supervise']
  training = commands[-1][commands[-1].index('--') + 1 :]
  assert training == [
    sys.executable,
    '-m',
    'het_plugin.train',
    '--gin_file=gin/runs/digits_smoke.gin',
    '--gin_file=het_plugin/gin/heads/het_xl.gin',
    '--gin.EVAL_STEPS=1',
    '--gin.WARMUP_STEPS=0',
    "--gin.NAME='a b'",
    '--gin.RANDOM_SEED=1',
    f"--gin.MODEL_DIR='{tmp_path}/sweep/het_xl-RANDOM_SEED=1'",
  ]
  assert '[4/4] het_xl-RANDOM_SEED=1' in printed
  assert not (tmp_path / 'sweep').exists()


def test_gke_applies_one_jobset_per_job(tmp_path, monkeypatch, run_main, dry_run):
  """With a kubectl that keeps what it is given, and refuses the third."""
  kubectl = tmp_path / 'bin' / 'kubectl'
  kubectl.parent.mkdir()
  kubectl.write_text(
    f'#!/bin/bash\n[[ "$*" == "apply -f -" ]] || exit 9\n'
    f'n=$(ls {tmp_path} | grep -c yaml)\n[[ $n -lt 2 ]] || exit 1\ncat > {tmp_path}/$n.yaml\n'
  )
  kubectl.chmod(0o755)
  monkeypatch.setenv('PATH', f'{kubectl.parent}:{os.environ["PATH"]}')
  assert dry_run(*GKE, '--heads=det,het,het_xl').count('kind: JobSet') == 3
  assert not list(tmp_path.glob('*.yaml'))
  message = run_main(xm_launch, *RUN, *GKE, '--heads=det,het,het_xl', '--name=sweep', code=2)
  assert 'kubectl' in message and 'gs://b/x/het_xl' in message
  documents = [yaml.safe_load((tmp_path / f'{i}.yaml').read_text()) for i in range(2)]
  assert [document['metadata']['name'] for document in documents] == ['sweep-det', 'sweep-het']
  spec = documents[1]['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
  assert "--gin.MODEL_DIR='gs://b/x/het'" in spec['containers'][0]['args']


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['--heads=det,hetxl', '--model_dir=x'], '--heads=hetxl is unknown'),
    (['--model_dir=gs://b/x'], '--model_dir=gs://b/x '),
    (
      ['--executor=vertex', '--model_dir=x', '--topology=v3:2x2'],
      '--executor=vertex needs --model_dir=gs://',
    ),
    (['--executor=kubernetes', *REMOTE, '--resources=h100=8'], '--resources=h100=8: '),
    (['--executor=kubernetes', *REMOTE, '--resources=a100=x'], 'a100=x must be a number above 0'),
    (['--executor=kubernetes', *REMOTE, '--resources=a100=8,t4=4'], 'must have at most one GPU'),
    (['--executor=kubernetes', *REMOTE, '--resources=a100=8,a100=4'], 'each name once'),
    (['--executor=kubernetes', *REMOTE], '--executor=kubernetes needs --resources=a100=8'),
    (['--executor=cloud', *REMOTE, '--resources=gpu=8'], '--resources=gpu=8: xm_cloud'),
    (['--executor=cloud', *REMOTE, '--resources=h100=8,cpu=4'], 'one GPU, or cpu and ram'),
    (['--executor=cloud', *REMOTE], 'needs --topology=v6e:4x4 or --resources='),
    (['--executor=cloud', *REMOTE, '--topology=tpu7x:2x2x2'], '--topology=tpu7x:2x2x2: XManager'),
    (['--executor=cloud', *REMOTE, '--topology=v6e:4x4'], '--executor=cloud needs --queue'),
    (['--model_dir=x', '--spot'], '--spot has no effect with --executor=local: it is for gke'),
    ([*GKE, '--max_parallel=2'], '--max_parallel has no effect with --executor=gke'),
  ],
)
def test_one_sentence_for_a_wrong_setting(arguments, words, dry_run):
  assert words in dry_run(*arguments, code=2)


@pytest.mark.skipif(XMANAGER, reason='XManager is installed')
def test_without_xmanager_vertex_is_one_sentence(run_main):
  where = [*REMOTE, '--topology=v3:2x2']
  message = run_main(xm_launch, *RUN, '--executor=vertex', *where, code=2)
  assert "pip install '.[launch]'" in message


# In place of training: seed 0 leaves metrics, seed 1 fails, another waits for SIGTERM.
TRAIN = """
import json, pathlib, signal, sys, time
seed, folder = [x.partition('=')[2].strip("'") for x in sys.argv[-2:]]
folder = pathlib.Path(folder)
if seed == '2':
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
  (folder / 'ready').touch()
  time.sleep(60)
rows = [{'step': 1, 'training_eval/digits/nll': 9}, {'step': 4, 'training_eval/digits/nll': 1.25}]
(folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + chr(10) for row in rows))
sys.exit(int(seed))
"""


def test_a_local_sweep_ends_with_a_table(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(sweep, 'TRAIN', ('-c', TRAIN))
  monkeypatch.setattr(xm_launch.processes, 'on_signals', lambda _: None)
  jobs = sweep.make_jobs(str(tmp_path), ['x.gin'], sweeps=['RANDOM_SEED=0,1'])
  assert xm_launch.launch_local(xm_launch.Settings(max_parallel=2), jobs) == 1
  table = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
  assert table == [
    ['run', 'exit', 'code', 'step', 'nll'],
    [f'{tmp_path}/RANDOM_SEED=0', '0', '4', '1.25'],
    [f'{tmp_path}/RANDOM_SEED=1', '1', '4', '1.25'],
  ]


@pytest.mark.slow
@pytest.mark.parametrize('read', [True, False])  # Ctrl-C ends a reader such as tee, too
def test_ctrl_c_lets_the_running_jobs_save(read, tmp_path):
  code = f'from launch import sweep, xm_launch as x\nsweep.TRAIN = ("-c", {TRAIN!r})\n'
  code += 'x.command_line.run_command(x)'
  arguments = [*RUN, f'--model_dir={tmp_path}', '--sweep=RANDOM_SEED=2,0']
  process = subprocess.Popen(
    [sys.executable, '-c', code, *arguments], cwd=ROOT, env=environment(tmp_path),
    stdout=subprocess.PIPE, text=True,
  )  # fmt: skip
  while not (tmp_path / 'RANDOM_SEED=2' / 'ready').exists():
    assert process.poll() is None
    time.sleep(0.1)
  if not read:
    process.stdout.close()
  process.send_signal(signal.SIGINT)
  if read:
    assert 'Stopping: each job saves' in process.stdout.read()
  assert process.wait(timeout=300) == 42
  assert not (tmp_path / 'RANDOM_SEED=0').exists()  # was not started


@pytest.mark.slow
def test_a_sweep_trains_here(tmp_path):
  arguments = [*TINY, f'--model_dir={tmp_path}/sweep', '--gin.TRAIN_STEPS=2']
  result = launch(tmp_path, *arguments, '--heads=det', '--sweep=RANDOM_SEED=1')
  assert result.returncode == 0, result.stderr
  (run,) = (tmp_path / 'sweep').iterdir()
  assert run.name == 'det-RANDOM_SEED=1' and (run / 'checkpoint_2').exists()


@pytest.mark.parametrize(
  ('executor', 'requirements'),
  [
    ('vertex', {'TPU_V3': 8}),
    ('kubernetes', {'A100': 4, 'CPU': 16}),
  ],
)
@needs_xmanager
def test_jobs_in_xmanager_have_the_requirements_and_arguments(executor, requirements):
  from xmanager import xm, xm_mock

  settings = xm_launch.Settings(
    image='i',
    executor=executor,
    **{'topology': 'v3:2x2'} if executor == 'vertex' else {'resources': ('a100=4', 'cpu=16')},
  )
  jobs = sweep.make_jobs('gs://b/x', ['x.gin'], ['A.flag = True'], sweeps=['A.none=None,False'])
  experiment = xm_mock.MockExperiment()
  asyncio.run(xm_launch.launch_in_xmanager(settings, experiment, jobs))
  launched = experiment.launched_jobs
  assert [job.args.to_list() for job in launched] == [
    xm.merge_args(job.arguments()).to_list() for job in jobs
  ]
  assert '--gin.A.none=None' in launched[0].args.to_list()
  assert '--gin.A.none=False' in launched[1].args.to_list()
  for job in launched:
    assert job.executor.requirements.task_requirements == {
      xm.ResourceType[name]: amount for name, amount in requirements.items()
    }
    assert re.fullmatch('[a-z0-9-]+', job.name)


@pytest.mark.slow
@needs_xmanager
def test_a_sweep_goes_to_xmanager_on_cloud(tmp_path):
  """With a server of its protocol on this machine, which keeps what it is sent."""
  import grpc
  from google.longrunning import operations_pb2
  from xmanager_cloud.experiment_state_server.proto import api_pb2_grpc, experiment_pb2

  sent = []

  class Server(api_pb2_grpc.ExperimentStateServiceServicer):
    def CreateExperiment(self, request, context):  # noqa: N802
      return experiment_pb2.Experiment(name='experiments/1', title=request.experiment.title)

    def UpdateExperimentLaunchState(self, request, context):  # noqa: N802
      return experiment_pb2.Experiment(name='experiments/1')

    def CreateWorkUnit(self, request, context):  # noqa: N802
      sent.append(request.work_unit)
      return operations_pb2.Operation(name=f'experiments/1/workUnits/{len(sent)}/operations/1')

  server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
  api_pb2_grpc.add_ExperimentStateServiceServicer_to_server(Server(), server)
  port = server.add_insecure_port('localhost:0')
  server.start()
  given = [
    '--executor=cloud',
    '--image=r/i:1',
    '--topology=v6e:4x4',
    '--queue=tpus',
    '--name=birds',
  ]
  given += ['--model_dir=gs://b/x', '--heads=det,het_xl', '--service_account=trainer']
  where = {'XMANAGER_ENDPOINT': f'http://localhost:{port}', 'XMC_AUTH_TOKEN': 'x'}
  done = subprocess.run(
    [sys.executable, '-m', 'launch.xm_launch', *RUN, *given], cwd=ROOT,
    env=environment(tmp_path) | where | {'XMC_USER_EMAIL': 'a@b.c'}, capture_output=True, text=True,
  )  # fmt: skip
  server.stop(None)
  assert done.returncode == 0, done.stderr
  assert [x.notes for x in sent] == ['det', 'het_xl']
  assert {x.executable.scheduling_constraints.queue_name for x in sent} == {'tpus'}
  (job,) = sent[1].executable.jobset.jobs
  assert job.service_account == 'trainer'
  assert (job.spec.resources.tpu_resources.type, job.spec.docker_image) == (
    'tpu-v6e-slice',
    'r/i:1',
  )
  assert job.spec.resources.tpu_resources.topology == '4x4'
  heads = 'het_plugin/gin/heads/het_xl.gin'
  assert list(job.spec.args_list[:2]) == [RUN[0], f'--gin_file={heads}']
  assert job.spec.args_list[-1] == "--gin.MODEL_DIR='gs://b/x/het_xl'"
