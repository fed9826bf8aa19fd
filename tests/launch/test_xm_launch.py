"""Launches: what --dry_run prints, and real ones if XManager is installed."""

import asyncio
import functools
import importlib.util
import os
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
    (['--model_dir=x', '--spot'], '--spot has no effect with --executor=local: it is for gke'),
    ([*GKE, '--max_parallel=2'], '--max_parallel has no effect with --executor=gke'),
  ],
)
def test_one_sentence_for_a_wrong_setting(arguments, words, dry_run):
  assert words in dry_run(*arguments, code=2)


@pytest.mark.skipif(XMANAGER, reason='XManager is installed')
def test_without_xmanager_vertex_is_one_sentence(run_main):
  where = ['--image=i', '--topology=v3:2x2', '--model_dir=gs://b/x']
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


def test_a_local_sweep_ends_with_a_table(tmp_path, monkeypatch, parsed_flags, capsys):
  monkeypatch.setattr(sweep, 'TRAIN', ('-c', TRAIN))
  monkeypatch.setattr(xm_launch.processes, 'on_signals', lambda _: None)
  jobs = sweep.make_jobs(str(tmp_path), ['x.gin'], sweeps=['RANDOM_SEED=0,1'])
  with parsed_flags(xm_launch, '--max_parallel=2'):
    assert xm_launch.launch_local(jobs) == 1
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
  code += 'x.command_line.run(x.main)'
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
  assert process.wait(timeout=30) == 42
  assert not (tmp_path / 'RANDOM_SEED=0').exists()  # was not started


@pytest.mark.slow
def test_a_sweep_trains_here(tmp_path):
  arguments = [*TINY, f'--model_dir={tmp_path}/sweep', '--gin.TRAIN_STEPS=2']
  result = launch(tmp_path, *arguments, '--heads=det', '--sweep=RANDOM_SEED=1')
  assert result.returncode == 0, result.stderr
  (run,) = (tmp_path / 'sweep').iterdir()
  assert run.name == 'det-RANDOM_SEED=1' and (run / 'checkpoint_2').exists()


@needs_xmanager
def test_vertex_jobs_have_the_requirements_and_arguments(tmp_path, monkeypatch):
  from xmanager import xm, xm_mock

  settings = {'image': 'i', 'topology': 'v3:2x2'}
  monkeypatch.setattr(xm_launch.flags, 'FLAGS', type('Values', (), settings))
  jobs = sweep.make_jobs('gs://b/x', ['x.gin'], ['A.flag = True'], sweeps=['A.none=None,False'])
  experiment = xm_mock.MockExperiment()
  asyncio.run(xm_launch.launch_vertex(experiment, jobs))
  launched = experiment.launched_jobs
  assert [job.args.to_list() for job in launched] == [
    xm.merge_args(job.arguments()).to_list() for job in jobs
  ]
  assert '--gin.A.none=None' in launched[0].args.to_list()
  assert '--gin.A.none=False' in launched[1].args.to_list()
  for job in launched:
    assert job.executor.requirements.task_requirements[xm.ResourceType.TPU_V3] == 8
