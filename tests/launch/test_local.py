"""Processes that find each other: what starts and ends them, and training in them.

The runs of training share two pairs of processes, for each spends most of its time on imports.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import gin
from het_plugin.config import parsing, registry
from het_plugin.config.training_run import train_from_gin
from het_plugin.operations import heartbeat, verdict
from het_plugin.training import checkpoints
from launch import local

ROOT = Path(__file__).parents[2]
GIN_FILES = ['gin/runs/digits_smoke.gin', 'gin/heads/het_xl.gin']
SETTINGS = [
  *('vit.width = 16', 'vit.depth = 1', 'vit.mlp_dim = 16', 'vit.num_heads = 2'),
  *('EVAL_PERIOD = 4', 'EVAL_STEPS = 2', 'SAVE_PERIOD = 2', 'STATS_PERIOD = 1', 'BATCH_SIZE = 16'),
  *('WARMUP_STEPS = 0', "warmup_schedule.decay = 'constant'"),
  "ACTIONS = {'TRAIN_EVAL': [@FewShotAction()]}",
  *('FewShotAction.image_size = 8', 'FewShotAction.channels = 1'),
  *('FewShotAction.shots = (1,)', 'FewShotAction.seeds = (0,)', 'FewShotAction.batch_size = 64'),
  'FewShotAction.datasets = (@FewShotDataset(),)',
  *("FewShotDataset.name = 'digits'", "FewShotDataset.task = 'digits'"),
]


def start(*command, processes=2, **flags):
  flags = [f'--{name}={value}' for name, value in flags.items()]
  return subprocess.Popen(
    [sys.executable, '-m', 'launch.local', f'--processes={processes}', *flags, '--', *command],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def run(code, *, timeout=30, **flags):
  """(exit code, output) of a Python program run as several processes."""
  process = start(sys.executable, '-c', code, **flags)
  output = process.communicate(timeout=timeout)[0]
  return process.returncode, output


def read_until(process, pattern):
  """Output up to the line that matches."""
  lines = []
  for line in process.stdout:
    lines.append(line)
    if re.search(pattern, line):
      return ''.join(lines)
  raise AssertionError(f'no line matches {pattern}:\n{"".join(lines)}')


def alive(pid):
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def wait_for(condition, seconds=20):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'it did not happen'
    time.sleep(0.05)


def test_each_process_gets_its_place():
  base = {'A': 'b', 'XLA_FLAGS': '--xla_x --xla_force_host_platform_device_count=8'}
  first, second = local.environments(base, 1234, 2, devices=4)
  assert first['JAX_COORDINATOR_ADDRESS'] == second['JAX_COORDINATOR_ADDRESS'] == 'localhost:1234'
  assert [first['JAX_PROCESS_ID'], second['JAX_PROCESS_ID']] == ['0', '1']
  assert first['JAX_NUM_PROCESSES'] == '2' and first['JAX_PLATFORMS'] == 'cpu'
  assert first['XLA_FLAGS'] == '--xla_x --xla_force_host_platform_device_count=4'
  assert first['A'] == 'b' and 'CUDA_VISIBLE_DEVICES' not in first
  (alone,) = local.environments(base, 1234, 1)
  assert alone['XLA_FLAGS'] == base['XLA_FLAGS'] and 'JAX_PLATFORMS' not in alone


@pytest.mark.parametrize(
  ('visible', 'expected'), [(None, ['0,1', '2,3']), ('4,5,GPU-6,7', ['4,5', 'GPU-6,7'])]
)
def test_gpus_are_split(visible, expected):
  base = {} if visible is None else {'CUDA_VISIBLE_DEVICES': visible}
  made = local.environments(base, 1234, 2, gpus_per_process=2)
  assert [environment['CUDA_VISIBLE_DEVICES'] for environment in made] == expected


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'processes': 0}, '--processes=0 must be at least 1'),
    ({'processes': 2, 'devices': 0}, '--devices=0'),
    ({'processes': 2, 'devices': 4, 'gpus_per_process': 1}, 'give one'),
    ({'processes': 2, 'gpus_per_process': 2}, 'needs 4 GPUs for 2 processes.*=0,1'),
  ],
)
def test_wrong_numbers_are_one_sentence(settings, message):
  with pytest.raises(ValueError, match=message):
    local.environments({'CUDA_VISIBLE_DEVICES': '0,1'}, 1234, **settings)


def test_lines_carry_the_number_of_their_process():
  code, output = run('import os; print("I am", os.environ["JAX_PROCESS_ID"], end="")', processes=3)
  assert code == 0
  assert sorted(output.splitlines()) == ['[0] I am 0', '[1] I am 1', '[2] I am 2']


def test_a_command_that_is_not_there_is_one_sentence():
  process = start('/no/such')
  assert process.communicate()[0] == "Error: [Errno 2] No such file or directory: '/no/such'\n"
  assert process.returncode == 2


# Process 0 and its child ignore SIGTERM; process 1 ends by the statement, once 0 is ready.
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


@pytest.mark.parametrize(
  ('end', 'code', 'how'),
  [
    ('sys.exit(3)', 3, 'ended with exit code 3'),
    ('os.kill(os.getpid(), signal.SIGKILL)', 137, 'died of SIGKILL'),
  ],
)
def test_one_that_fails_ends_the_others(tmp_path, end, code, how):
  program = STUBBORN.format(ready=str(tmp_path / 'ready'), end=end)
  before = time.monotonic()
  result, output = run(program, end_seconds=0.5)
  assert time.monotonic() - before < 20
  assert result == code
  assert f'[local] process 1 {how}: ending process 0\n' in output
  assert '[local] killing process 0, which did not end\n' in output
  child = int(re.search(r'\[0\] child (\d+)', output)[1])
  wait_for(lambda: not alive(child))


PATIENT = """
import os, signal, sys, time
def save(*_):
  print('saved', flush=True)
  sys.exit(42)
signal.signal(signal.SIGTERM, save)
print('ready', os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_all_save(number):
  process = start(sys.executable, '-c', PATIENT)
  read_until(process, 'ready')
  read_until(process, 'ready')
  process.send_signal(number)
  assert sorted(process.communicate(timeout=20)[0].splitlines()) == ['[0] saved', '[1] saved']
  assert process.returncode == 42


def test_one_that_fails_after_a_signal_does_not_leave_the_others_their_grace(tmp_path):
  program = STUBBORN.format(ready=str(tmp_path / 'ready'), end='time.sleep(60)')
  process = start(sys.executable, '-c', program, end_seconds=0.5)
  read_until(process, 'child')
  process.terminate()
  assert (
    '[local] process 1 died of SIGTERM: ending process 0\n' in process.communicate(timeout=20)[0]
  )
  assert process.returncode == 128 + signal.SIGTERM


def test_after_the_grace_period_they_are_killed(tmp_path):
  program = STUBBORN.format(ready=str(tmp_path / 'ready'), end='time.sleep(60)')
  program = program.replace("== '0'", "< '2'")  # both are stubborn
  process = start(sys.executable, '-c', program, grace_seconds=0.5)
  read_until(process, 'child')
  read_until(process, 'child')
  process.terminate()
  assert 'killing processes 0, 1, which did not end' in process.communicate(timeout=20)[0]
  assert process.returncode == 128 + signal.SIGKILL


@pytest.mark.skipif(sys.platform != 'linux', reason='prctl')
def test_none_is_left_when_the_launcher_is_killed():
  process = start(sys.executable, '-c', PATIENT)
  text = read_until(process, 'ready') + read_until(process, 'ready')
  process.kill()
  for pid in re.findall(r'ready (\d+)', text):
    wait_for(lambda pid=int(pid): not alive(pid))


# Training.


def start_training(model_dir, *bindings):
  model_dir.mkdir(exist_ok=True)
  return start(
    *(sys.executable, '-m', 'launch.recorded_train', str(model_dir)),
    *(f'--gin_file={file}' for file in GIN_FILES),
    *(f'--gin.{text}' for text in (*SETTINGS, *bindings, f"MODEL_DIR = '{model_dir}'")),
    devices=4,
    end_seconds=1,
  )


def train_here(model_dir):
  """Four steps in this one process of eight devices; {name: array} of the parameters."""
  registry.register_trainer()
  files = [f'het_plugin/{file}' for file in GIN_FILES]
  parsing.parse_config(files, [*SETTINGS, 'TRAIN_STEPS = 4', f"MODEL_DIR = '{model_dir}'"])
  train_from_gin()
  gin.clear_config()
  return checkpoints.read_params(str(model_dir))


def lines(model_dir):
  path = model_dir / 'metrics.jsonl'
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(model_dir):
  return {row['step']: row['train/loss'] for row in lines(model_dir) if 'train/loss' in row}


def examples(path):
  """Of each step of a process."""
  events = map(json.loads, path.read_text().splitlines())
  return [event['index'] for event in events if 'begin' in event]


def steps_saved(model_dir):
  return sorted(int(path.name.removeprefix('checkpoint_')) for path in model_dir.glob('check*'))


def copy_step_2(run_dir, to):
  """A run interrupted at its second step."""
  shutil.copytree(run_dir / 'checkpoint_2', to / 'checkpoint_2')
  return to


def assert_same_params(got, expected):
  """To 1e-4; but for the bias of attention keys, whose gradient is rounding error around zero."""
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    if not name.endswith('attention/key/bias'):
      np.testing.assert_allclose(got[name], value, atol=1e-4, err_msg=name)


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  folder = tmp_path_factory.mktemp('alone')
  return folder, train_here(folder)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  """Two processes of four devices, mesh 8 x 1."""
  folder = tmp_path_factory.mktemp('pair')
  process = start_training(folder, 'TRAIN_STEPS = 4')
  output = process.communicate(timeout=400)[0]
  assert process.returncode == 0, output[-5000:]
  return folder, output


def test_two_processes_train_as_one_does(pair, alone):
  folder, output = pair
  assert 'Process 1 of 2: 4 of 8 devices' in output
  got, expected = losses(folder), losses(alone[0])
  assert list(got) == [1, 2, 3, 4]
  np.testing.assert_allclose(list(got.values()), list(expected.values()), atol=1e-5)
  assert_same_params(checkpoints.read_params(str(folder)), alone[1])


def test_process_0_alone_writes(pair):
  folder, output = pair
  names = [path.name for path in folder.iterdir() if not path.name.startswith('process-')]
  events = [name for name in names if name.startswith('events')]
  assert len(events) == 1
  assert sorted({*names} - {*events}) == [
    *('attempts', 'checkpoint_2', 'checkpoint_4', 'config.gin', 'fewshot.jsonl', 'heartbeats'),
    *('logs', 'metrics.jsonl'),
  ]
  assert [beat.state for beat in heartbeat.read(folder)] == [verdict.DONE] * 2
  assert len([row for row in lines(folder) if 'train/loss' in row]) == 4
  assert '[1]' in output and not re.search(r'^\[1\].*logging_writer', output, re.M)


def test_each_process_reads_its_rows_only(pair):
  """A batch is 16 rows over 8 devices, of which each process has 4."""
  first, second = (examples(pair[0] / f'process-{i}.jsonl')[:4] for i in range(2))
  assert {len(batch) for batch in first + second} == {8}
  assert len({*np.ravel(first), *np.ravel(second)}) == 4 * 16


def test_few_shot_action_gives_what_one_process_gets(pair, alone):
  (got,), (expected,) = (
    [json.loads(line) for line in (folder / 'fewshot.jsonl').read_text().splitlines()]
    for folder in (pair[0], alone[0])
  )
  assert got['step'] == 4 and got.keys() == expected.keys()
  assert [row for row in lines(pair[0]) if 'fewshot/digits/1shot' in row]
  np.testing.assert_allclose(got['mean'], expected['mean'], atol=0.01)


def test_one_process_resumes_what_two_saved(pair, alone, tmp_path):
  folder = copy_step_2(pair[0], tmp_path)
  assert_same_params(train_here(folder), alone[1])
  expected = losses(alone[0])
  got = losses(folder)
  assert list(got) == [3, 4]
  np.testing.assert_allclose(list(got.values()), [expected[3], expected[4]], atol=1e-5)


def test_two_resume_what_one_saved_and_stop_together(alone, tmp_path):
  """On the mesh 1 x 8, whose model axis crosses processes. One of them gets SIGTERM before its
  first step.
  """
  folder = copy_step_2(alone[0], tmp_path)
  settings = ['TRAIN_STEPS = 1000', 'PjitPartitioner.num_partitions = 8', 'SAVE_PERIOD = 1000']
  process = start_training(folder, *settings, 'EVAL_PERIOD = 1000')
  read_until(process, r'^\[1\].*Resuming from')
  (pid,) = {pid for pid in children(process.pid) if b'JAX_PROCESS_ID=1\0' in environment(pid)}
  os.kill(pid, signal.SIGTERM)
  output = process.communicate(timeout=200)[0]
  assert process.returncode == 42, output[-5000:]
  # While it compiles there is nothing new to save; else it is the next step.
  saved = steps_saved(folder)
  assert saved in ([2], [2, 3])
  expected = {3: pytest.approx(losses(alone[0])[3], abs=1e-5)} if saved == [2, 3] else {}
  assert losses(folder) == expected
  if saved == [2, 3]:
    first, second = (examples(folder / f'process-{i}.jsonl') for i in range(2))
    assert len(first[0]) == 16 and first[:1] == second[:1]  # peers along model: the same rows
  assert {beat.state for beat in heartbeat.read(folder)} == {verdict.PREEMPTED}


def children(pid):
  return map(int, Path(f'/proc/{pid}/task/{pid}/children').read_text().split())


def environment(pid):
  return b'\0' + Path(f'/proc/{pid}/environ').read_bytes()
