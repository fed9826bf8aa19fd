"""launch.local: how processes are started and ended together, and training in them."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gin
from het_plugin.config import parsing
from het_plugin.runs.starting import train_from_gin
from het_plugin.training import checkpoint_reader
from launch import local
from tests.training.toy_run import lines, series
from tests.waiting import PATIENT, alive, wait_for

ROOT = Path(__file__).parents[2]


def start(*command, processes=2, **flags):
  flags = [f'--{name}={value}' for name, value in flags.items()]
  return subprocess.Popen(
    [sys.executable, '-m', 'launch.local', f'--processes={processes}', *flags, '--', *command],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def run(code, **flags):
  """(exit code, output) of a Python program that runs as several processes."""
  process = start(sys.executable, '-c', code, **flags)
  output = process.communicate(timeout=300)[0]
  return process.returncode, output


def read_until(process, pattern):
  """The output up to the first line that matches."""
  lines = []
  for line in process.stdout:
    lines.append(line)
    if re.search(pattern, line):
      return ''.join(lines)
  raise AssertionError(f'no line matches {pattern}:\n{"".join(lines)}')


def test_each_process_gets_its_place():
  base = {'A': 'b', 'XLA_FLAGS': '--xla_x --xla_force_host_platform_device_count=8'}
  first, second = local.environments(base, 1234, 2, devices=4)
  assert first['JAX_COORDINATOR_ADDRESS'] == second['JAX_COORDINATOR_ADDRESS'] == '127.0.0.1:1234'
  assert [first['JAX_PROCESS_ID'], second['JAX_PROCESS_ID']] == ['0', '1']
  assert first['JAX_NUM_PROCESSES'] == '2' and first['JAX_PLATFORMS'] == 'cpu'
  assert first['XLA_FLAGS'] == '--xla_x --xla_force_host_platform_device_count=4'
  assert first['A'] == 'b' and 'CUDA_VISIBLE_DEVICES' not in first
  (alone,) = local.environments(base, 1234, 1)
  assert alone['XLA_FLAGS'] == base['XLA_FLAGS'] and 'JAX_PLATFORMS' not in alone
  base = {'CUDA_VISIBLE_DEVICES': '4,5,GPU-6,7'}
  made = local.environments(base, 1234, 2, gpus_per_process=2)
  assert [environment['CUDA_VISIBLE_DEVICES'] for environment in made] == ['4,5', 'GPU-6,7']


LISTENING = """
import os, pathlib, jax
address = os.environ['JAX_COORDINATOR_ADDRESS']
jax.distributed.initialize(address, 1, 0)
port = int(address.split(':')[1])
for name in ('tcp', 'tcp6'):
  for line in pathlib.Path(f'/proc/net/{name}').read_text().splitlines()[1:]:
    _, address, _, state = line.split()[:4]
    if state == '0A' and int(address.split(':')[1], 16) == port:
      print('listens on', address.split(':')[0])
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc/net/tcp')
def test_the_coordinator_listens_on_loopback_unless_asked():
  code, output = run(LISTENING, processes=1, devices=1)
  assert code == 0, output
  # 127.0.0.1, in the table of IPv6 as ::ffff:127.0.0.1
  assert re.fullmatch(r'\[0\] listens on (0{16}FFFF0000)?0100007F\n', output)
  asked = {'JAX_COORDINATOR_BIND_ADDRESS': '0.0.0.0:1234'}
  assert local.environments(asked, 1234, 1)[0].items() >= asked.items()


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'processes': 2, 'devices': 4, 'gpus_per_process': 1}, '--devices=4 .*--gpus_per_process=1 '),
    (
      {'processes': 2, 'gpus_per_process': 2},
      '--gpus_per_process=2 .* 4 .*CUDA_VISIBLE_DEVICES=0,1,',
    ),
  ],
)
def test_wrong_numbers_are_one_sentence(settings, message):
  with pytest.raises(ValueError, match=message):
    local.environments({'CUDA_VISIBLE_DEVICES': '0,1,'}, 1234, **settings)


def test_lines_carry_the_number_of_their_process():
  code, output = run('import os; print("I am", os.environ["JAX_PROCESS_ID"], end="")', processes=3)
  assert code == 0
  assert sorted(output.splitlines()) == ['[0] I am 0', '[1] I am 1', '[2] I am 2']


# Process 0 and its child ignore SIGTERM; process 1 runs the last statement once 0 is ready.
STUBBORN = """
import os, signal, subprocess, sys, time
ready = {ready!r}
if os.environ['JAX_PROCESS_ID'] == '0':
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
  print('child', child.pid, flush=True)
  open(ready, 'w').close()
  time.sleep(60)
while not os.path.exists(ready):
  time.sleep(0.02)
{end}
"""


def test_a_failed_process_ends_the_others(tmp_path):
  end = 'os.kill(os.getpid(), signal.SIGKILL)'
  result, output = run(STUBBORN.format(ready=str(tmp_path / 'ready'), end=end), end_seconds=0.5)
  assert result == 137
  assert '[local] process 1 died of SIGKILL: ending process 0\n' in output
  assert '[local] killing process 0, which did not end\n' in output
  child = int(re.search(r'\[0\] child (\d+)', output)[1])
  wait_for(lambda: not alive(child))


def test_a_signal_lets_all_save():
  process = start(sys.executable, '-c', PATIENT)
  read_until(process, 'ready')
  read_until(process, 'ready')
  process.send_signal(signal.SIGINT)
  assert sorted(process.communicate(timeout=300)[0].splitlines()) == ['[0] saved', '[1] saved']
  assert process.returncode == 42


FAILS_OF_TWO = """
import os, pathlib, signal, sys, time
def save(*_):
  time.sleep(0.3)
  pathlib.Path({path!r}, 'saved').touch()
  sys.exit(42)
signal.signal(signal.SIGTERM, save)
if os.environ['JAX_PROCESS_ID'] == '1':
  print('x' * 10**6)  # more than a pipe holds
  while not pathlib.Path({path!r}, 'ready').exists():
    time.sleep(0.02)
  sys.exit(3)
pathlib.Path({path!r}, 'ready').touch()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='/dev/full')
def test_a_full_disk_of_the_output_ends_no_process(tmp_path):
  command = [sys.executable, '-m', 'launch.local', '--processes=2', '--']
  command += [sys.executable, '-c', FAILS_OF_TWO.format(path=str(tmp_path))]
  with open('/dev/full', 'w') as full:
    done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=full, timeout=300)
  assert done.returncode == 3
  assert (tmp_path / 'saved').exists()


@pytest.mark.skipif(sys.platform != 'linux', reason='prctl')
def test_none_is_left_when_the_launcher_is_killed():
  process = start(sys.executable, '-c', PATIENT)
  text = read_until(process, 'ready') + read_until(process, 'ready')
  process.kill()
  for pid in re.findall(r'ready (\d+)', text):
    wait_for(lambda pid=int(pid): not alive(pid))


# Training. Slow, because a start of two training processes takes most of a minute of CPU time.

GIN_FILES = ['gin/runs/digits_smoke.gin', 'gin/heads/het_xl.gin']
SETTINGS = [
  'vit.width = 16',
  'vit.depth = 1',
  'vit.mlp_dim = 16',
  'vit.num_heads = 2',
  'EVAL_PERIOD = 4',
  'EVAL_STEPS = 2',
  'SAVE_PERIOD = 2',
  'STATS_PERIOD = 1',
  'BATCH_SIZE = 16',
  'WARMUP_STEPS = 0',
  "warmup_schedule.decay = 'constant'",
  'HetXL.num_factors = 4',
  'train/Integrator.num_samples = 2',
]
EVALUATED = [
  'eval/Integrator.num_samples = 2',
  "ACTIONS = {'TRAIN_EVAL': [@FewShotAction()]}",
  'FewShotAction.image_size = 8',
  'FewShotAction.channels = 1',
  'FewShotAction.shots = (1,)',
  'FewShotAction.seeds = (0,)',
  'FewShotAction.batch_size = 64',
  'FewShotAction.datasets = (@FewShotDataset(),)',
  "FewShotDataset.name = 'digits'",
  "FewShotDataset.task = 'digits'",
]
NOT_EVALUATED = 'train.train_eval_dataset_cfg = None'


def start_training(model_dir, *bindings):
  return start(
    sys.executable,
    '-m',
    'het_plugin.train',
    *(f'--gin_file={file}' for file in GIN_FILES),
    *(f'--gin.{text}' for text in (*SETTINGS, *bindings, f"MODEL_DIR = '{model_dir}'")),
    devices=4,
    end_seconds=1,
  )


def train_here(model_dir, *bindings):
  """Trains four steps in this process with eight devices; {name: array} of the parameters."""
  files = [f'het_plugin/{file}' for file in GIN_FILES]
  bindings = [*SETTINGS, *bindings, 'TRAIN_STEPS = 4', f"MODEL_DIR = '{model_dir}'"]
  parsing.parse_config(files, bindings)
  train_from_gin()
  gin.clear_config()
  return checkpoint_reader.read_params(str(model_dir))


def copy_step_2(run_dir, to):
  """Makes a folder as a run leaves it that was interrupted after its second step."""
  shutil.copytree(run_dir / 'checkpoint_2', to / 'checkpoint_2')
  return to


def assert_same_params(got, expected):
  """Compares to 1e-4, except the bias of attention keys: its gradient is rounding error only."""
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    if not name.endswith('attention/key/bias'):
      np.testing.assert_allclose(got[name], value, atol=1e-4, err_msg=name)


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  folder = tmp_path_factory.mktemp('alone')
  return folder, train_here(folder, *EVALUATED)


@pytest.mark.slow
def test_two_processes_train_as_one_does_which_resumes_their_run(alone, tmp_path):
  """Two processes of four devices, mesh 8 x 1. Each reads its own rows, or losses would differ."""
  folder = tmp_path / 'pair'
  expected = series(alone[0], 'train/loss')
  process = start_training(folder, *EVALUATED, 'TRAIN_STEPS = 4')
  output = process.communicate(timeout=400)[0]
  assert process.returncode == 0, output[-5000:]
  got = series(folder, 'train/loss')
  assert list(got) == [1, 2, 3, 4]
  np.testing.assert_allclose(list(got.values()), list(expected.values()), atol=1e-5)
  assert_same_params(checkpoint_reader.read_params(str(folder)), alone[1])
  # Process 0 alone writes results.
  assert len(list(folder.glob('events*'))) == 1
  assert len([row for row in lines(folder) if 'train/loss' in row]) == 4
  (few_shot,), (of_one,) = (lines(x / 'fewshot.jsonl') for x in (folder, alone[0]))
  assert few_shot['step'] == 4
  np.testing.assert_allclose(few_shot['mean'], of_one['mean'], atol=0.01)
  # One process resumes on its own mesh. It evaluates nothing, which would be compiled again.
  resumed = copy_step_2(folder, tmp_path / 'resumed')
  assert_same_params(train_here(resumed, NOT_EVALUATED), alone[1])
  got = series(resumed, 'train/loss')
  assert list(got) == [3, 4]
  np.testing.assert_allclose(list(got.values()), [expected[3], expected[4]], atol=1e-5)


@pytest.mark.slow
def test_two_resume_what_one_saved_and_stop_together(alone, tmp_path):
  """Mesh 1 x 8: its model axis crosses processes. One gets SIGTERM before its first step."""
  folder = copy_step_2(alone[0], tmp_path)
  settings = ['TRAIN_STEPS = 1000', 'PjitPartitioner.num_partitions = 8', 'SAVE_PERIOD = 1000']
  settings.append(NOT_EVALUATED)
  process = start_training(folder, *settings)
  read_until(process, r'^\[1\].*Resuming from')
  children = Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
  (pid,) = (
    pid for pid in children if b'\0JAX_PROCESS_ID=1\0' in Path(f'/proc/{pid}/environ').read_bytes()
  )
  os.kill(int(pid), signal.SIGTERM)
  output = process.communicate(timeout=400)[0]
  assert process.returncode == 42, output[-5000:]
  # Before the first step has compiled there is nothing new to save; otherwise step 3 is saved.
  saved = sorted(path.name for path in folder.glob('checkpoint_*'))
  assert saved in (['checkpoint_2'], ['checkpoint_2', 'checkpoint_3'])
  expected = (
    {3: pytest.approx(series(alone[0], 'train/loss')[3], abs=1e-5)} if len(saved) == 2 else {}
  )
  assert series(folder, 'train/loss') == expected


@pytest.mark.slow
def test_two_processes_fine_tune_a_candidate_and_select(alone, tmp_path):
  process = start(
    sys.executable,
    '-m',
    'het_plugin.finetune',
    f'--checkpoint={alone[0]}',
    '--split=test',
    '--batch_size=64',
    '--gin.TRAIN_STEPS=1',
    '--gin.ACTIONS={}',
    f'--output_dir={tmp_path}',
    devices=1,
  )
  output = process.communicate(timeout=400)[0]
  assert process.returncode == 0, output[-5000:]
  assert re.findall(r'^\[(\d)\] members: ', output, re.MULTILINE) == ['0']  # which prints alone
