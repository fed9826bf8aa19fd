"""launch/tpu_vm.sh with --dry_run, and with a fake gcloud that keeps its state in files."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch import supervise
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / 'launch' / 'tpu_vm.sh'
WHERE = ['--name=het', '--zone=us-east5-a', '--project=p']
TRAIN = ['--', '--gin_file=gin/runs/digits_smoke.gin', "--gin.NAME='a b'"]
RUN = ['run', *WHERE, '--topology=v5e:4x4', '--model_dir=gs://b/x', '--poll_seconds=0.01']

# `state` lists the states that describe returns, one per line; the last one stays. `codes` lists
# the exit codes that the first host reports, in the same way: '-' for a run that goes on, 'gone' if
# the host does not answer, 'here' if this machine is the host. `fail` lists words of commands that
# fail once each.
FAKE_GCLOUD = """#!/bin/bash
cd {folder}
printf '%q ' "$@" >> calls; echo >> calls
next() {{ head -n 1 $1; [[ $(wc -l < $1) -gt 1 ]] && sed -i 1d $1; }}
word=$(head -n 1 fail 2>/dev/null)
if [[ -n "$word" && "$*" == *"$word"* ]]; then
  sed -i 1d fail; echo "ERROR: no $word" >&2; exit 1
fi
case "$*" in
  *' describe '*)
    state=$(next state)
    echo 'WARNING: a word on stderr' >&2
    if [[ $state == NONE ]]; then echo 'ERROR: NOT_FOUND: Resource was not found' >&2; exit 1; fi
    if [[ $state == DOWN ]]; then echo 'ERROR: 503' >&2; exit 1; fi
    echo $state ;;
  *'cat het_plugin/run/supervisor.json'*)
    code=$(next codes)
    [[ $code == gone ]] && exit 255
    if [[ $code == here ]]; then
      for word; do [[ $word == --command=* ]] && eval "${{word#--command=}}"; done
      exit 0
    fi
    [[ $code == - ]] && code=null
    echo "{{\\"pid\\": 1, \\"end_with\\": null, \\"restarts\\": 0, \\"exit_code\\": $code}}" ;;
esac
"""


class Cloud:
  """The fake gcloud's folder."""

  def __init__(self, folder):
    self.folder = folder
    (folder / 'bin').mkdir(parents=True)
    gcloud = folder / 'bin' / 'gcloud'
    gcloud.write_text(FAKE_GCLOUD.format(folder=folder))
    gcloud.chmod(0o755)

  def script(self, *arguments, states=('ACTIVE',), codes=('0',), fail=(), path=SCRIPT):
    for name, lines in (('state', states), ('codes', codes), ('fail', fail)):
      (self.folder / name).write_text(''.join(f'{line}\n' for line in lines))
    (self.folder / 'calls').write_text('')
    programs = f'{self.folder / "bin"}:{os.environ["PATH"]}'
    return subprocess.run(
      ['bash', str(path), *arguments],
      cwd=self.folder,
      env={**os.environ, 'PATH': programs},
      capture_output=True,
      text=True,
      timeout=300,
    )

  @property
  def calls(self):
    return [shlex.split(line) for line in (self.folder / 'calls').read_text().splitlines()]

  @property
  def verbs(self):
    """create, describe, ...; for ssh, what it does."""
    kinds = {'uv pip install': 'install', 'launch.supervise': 'start', 'supervisor.json': 'look'}
    found = []
    for call in self.calls:
      command = next((x for x in call if x.startswith('--command=')), '')
      found.append(next((kind for part, kind in kinds.items() if part in command), call[3]))
    return found


@pytest.fixture
def cloud(tmp_path):
  return Cloud(tmp_path / 'cloud')


def changes(verbs):
  """The commands that change something; how often the script looks depends on time."""
  return [verb for verb in verbs if verb not in ('describe', 'look')]


def test_a_dry_run_prints_every_command_and_runs_none(cloud):
  result = cloud.script(*RUN, '--num_slices=2', '--spot', '--dry_run', *TRAIN)
  assert result.returncode == 0, result.stderr
  commands = [shlex.split(line) for line in result.stdout.splitlines()]
  assert not cloud.calls
  assert {command[0] for command in commands} == {'gcloud'}
  assert all(command[-2:] == ['--zone=us-east5-a', '--project=p'] for command in commands)
  assert [command[4] for command in commands] == ['describe', 'create', 'scp', 'ssh', 'ssh', 'ssh']
  assert commands[1][5:-2] == [
    'het',
    '--accelerator-type=v5litepod-16',
    '--runtime-version=v2-alpha-tpuv5-lite',
    '--node-count=2',
    '--node-prefix=het',
    '--spot',
  ]
  assert {'--node=all', '--worker=all'} <= set(commands[4])
  (command,) = (x.removeprefix('--command=') for x in commands[4] if x.startswith('--command='))
  words = shlex.split(command)  # as the shell of the host does
  start = words.index('het_plugin.train') + 1
  assert words[start : words.index('>')] == [
    '--gin.PjitPartitioner.num_replicas=2',
    '--gin_file=gin/runs/digits_smoke.gin',
    "--gin.NAME='a b'",
    "--gin.MODEL_DIR='gs://b/x'",
  ]


def test_from_nothing_to_done(cloud):
  states = ['NONE', 'WAITING_FOR_RESOURCES', 'DOWN', 'PROVISIONING', 'ACTIVE']
  result = cloud.script(*RUN, *TRAIN, states=states, codes=['-', 'gone', '0'])
  assert result.returncode == 0, result.stderr
  assert changes(cloud.verbs) == ['create', 'scp', 'install', 'start']
  assert cloud.verbs.count('look') == 3 and 'does not answer' in result.stderr


def test_a_preemption_requests_the_resource_again_and_resumes(cloud):
  states = ['ACTIVE', 'ACTIVE', 'SUSPENDING', 'SUSPENDED', 'NONE', 'PROVISIONING', 'ACTIVE']
  result = cloud.script(*RUN, *TRAIN, states=states, codes=['-', '0'])
  assert result.returncode == 0, result.stderr
  once = ['scp', 'install', 'start']
  assert changes(cloud.verbs) == [*once, 'delete', 'create', *once]
  assert 'preempted; resuming from the newest checkpoint' in result.stderr


def test_a_run_that_was_preempted_or_killed_starts_again_and_another_failure_does_not(cloud):
  result = cloud.script(*RUN, *TRAIN, codes=['42', '-', '134', '134', '0'])
  assert result.returncode == 0, result.stderr
  assert cloud.verbs.count('start') == 3 and 'create' not in cloud.verbs
  for code, words in (('2', 'a setting is wrong'), ('1', 'exit code 1')):
    result = cloud.script(*RUN, *TRAIN, codes=[code])
    assert result.returncode == 1 and words in result.stderr
    assert cloud.verbs.count('start') == 1
  result = cloud.script(*RUN, '--max_attempts=2', *TRAIN, codes=['42'])
  assert result.returncode == 1 and 'preempted or failed 2 times' in result.stderr
  assert cloud.verbs.count('start') == 2


@pytest.mark.skipif(sys.platform != 'linux', reason='the hosts of TPUs have Linux')
def test_a_run_whose_supervisor_was_killed_starts_again(cloud):
  run = cloud.folder / 'het_plugin' / 'run'
  command = [sys.executable, '-m', 'launch.supervise', f'--folder={run}', '--', 'sleep', '60']
  supervisor = subprocess.Popen(command, cwd=ROOT)
  wait_for(lambda: supervise.read_state(run))
  cloud.script(*RUN, *TRAIN, codes=['here', '0'])
  assert cloud.verbs.count('look') == 2 and cloud.verbs.count('start') == 1
  supervisor.kill()
  supervisor.wait()
  result = cloud.script(*RUN, *TRAIN, codes=['here', 'here', '0'])
  assert result.returncode == 0 and 'exit code 137; resuming' in result.stderr
  assert cloud.verbs.count('start') == 2


@pytest.mark.skipif(sys.platform != 'linux', reason='the hosts of TPUs have Linux')
def test_a_run_whose_supervisor_never_started_starts_again(cloud):
  result = cloud.script(*RUN, *TRAIN, codes=['here', '0'])
  assert result.returncode == 0 and 'exit code 137; resuming' in result.stderr
  assert cloud.verbs.count('start') == 2


def test_a_run_that_trains_already_keeps_its_arguments_and_says_so(cloud):
  with (cloud.folder / 'bin' / 'gcloud').open('a') as program:
    program.write('[[ "$*" == *launch.supervise* ]] && echo "Error: run is in use: {}"; true\n')
  result = cloud.script(*RUN, *TRAIN)
  assert result.returncode == 0
  assert 'training runs already, with the arguments that it was started with' in result.stderr


def test_a_machine_without_gcloud_or_python_is_told_so(tmp_path):
  for name in ('bash', 'dirname', 'mktemp', 'rm', 'mkdir'):
    (tmp_path / name).symlink_to(shutil.which(name))
  no_gcloud = 'there is no gcloud here'
  for arguments, words in (
    (['delete', *WHERE], no_gcloud),
    (['collect', *WHERE, '--model_dir=gs://b/x'], no_gcloud),
    (['create', *WHERE, '--topology=v5e:4x4'], 'python3 must be Python 3.10 or newer'),
  ):
    result = subprocess.run(
      ['bash', str(SCRIPT), *arguments],
      cwd=tmp_path,
      env={'PATH': str(tmp_path)},
      capture_output=True,
      text=True,
    )
    assert result.returncode == 1 and words in result.stderr
    assert result.stderr.count('\n') == 1 and not (tmp_path / 'runs').exists()


def test_a_host_lost_while_installing_is_tried_again(cloud):
  result = cloud.script(*RUN, *TRAIN, fail=['scp', 'uv pip install', 'launch.supervise'])
  assert result.returncode == 0, result.stderr
  assert result.stderr.count('installing or starting failed') == 3


def test_a_host_that_failed_first_decides(cloud):
  result = cloud.script(*RUN, *TRAIN, codes=['134', '1'])
  assert result.returncode == 1 and 'exit code 1' in result.stderr
  assert cloud.verbs.count('start') == 1


def test_a_request_that_fails_after_a_preemption_is_repeated(cloud):
  states = ['ACTIVE', *['SUSPENDED'] * 3, 'NONE', 'NONE', 'ACTIVE']
  failing = ['queued-resources delete', 'queued-resources create']
  result = cloud.script(*RUN, *TRAIN, states=states, codes=['0'], fail=failing)
  assert result.returncode == 0, result.stderr
  once = ['scp', 'install', 'start']
  assert changes(cloud.verbs) == [*once, 'delete', 'delete', 'create', 'create', *once]
  # The first request may be wrong.
  result = cloud.script(*RUN, *TRAIN, states=['NONE'], fail=failing[1:])
  assert result.returncode == 1 and cloud.verbs == ['describe', 'create']


def test_requests_that_fail_again_and_again_end_the_script(cloud):
  states = ['NONE', *['FAILED', 'FAILED', 'NONE'] * 3]
  result = cloud.script(*RUN, *TRAIN, states=states)
  assert result.returncode == 1 and 'failed 3 times in a row' in result.stderr
  assert changes(cloud.verbs) == ['create', 'delete', 'create', 'delete', 'create']


def test_a_checkout_that_cannot_be_packed_ends_the_script_before_anything_is_requested(tmp_path):
  cloud = Cloud(tmp_path / 'cloud')
  for name in ('launch/tpu_vm.sh', 'het_plugin/planning/slices.py'):
    (tmp_path / name).parent.mkdir(parents=True)
    shutil.copy(ROOT / name, tmp_path / name)
  result = cloud.script(*RUN, *TRAIN, path=tmp_path / 'launch' / 'tpu_vm.sh')
  assert result.returncode == 1 and 'must be a git repository' in result.stderr
  assert not cloud.calls


def test_status_and_delete(cloud):
  result = cloud.script('status', *WHERE, codes=['-'])
  assert 'het: ACTIVE' in result.stdout and '"exit_code": null' in result.stdout
  result = cloud.script('status', *WHERE, codes=['gone'])
  assert result.returncode == 1 and 'the first host does not answer' in result.stderr
  assert cloud.script('status', *WHERE, states=['SUSPENDED']).stdout == 'het: SUSPENDED\n'
  assert cloud.verbs == ['describe']
  assert cloud.script('delete', *WHERE).returncode == 0
  assert ['delete', 'het', '--force', '--quiet'] == cloud.calls[-1][3:7]
  assert cloud.script('delete', *WHERE, states=['NONE']).returncode == 0
  assert cloud.verbs == ['describe']


def test_collect_leaves_the_checkpoints_where_they_are(cloud):
  result = cloud.script('collect', *WHERE, '--model_dir=gs://b/x', '--into=here')
  assert result.returncode == 0, result.stderr
  rsync, scp = cloud.calls
  assert rsync[:2] == ['storage', 'rsync'] and rsync[-3:-1] == ['gs://b/x', 'here']
  (pattern,) = [x.removeprefix('--exclude=') for x in rsync if x.startswith('--exclude=')]
  assert re.match(pattern, 'checkpoint_400/params/x') and not re.match(pattern, 'metrics.jsonl')
  assert scp[4:6] == ['het:het_plugin/run/supervisor.log', 'here/supervisor.log']


@pytest.mark.parametrize(
  ('topology', 'accelerator', 'runtime'),
  [
    ('v3:4x4', '--accelerator-type=v3-32', 'tpu-ubuntu2204-base'),
    ('v4:2x2x4', '--type=v4 --topology=2x2x4', 'tpu-ubuntu2204-base'),
    ('v6e:4x8', '--accelerator-type=v6e-32', 'v2-alpha-tpuv6e'),
  ],
)
def test_accelerator_types(cloud, topology, accelerator, runtime):
  result = cloud.script('create', *WHERE, f'--topology={topology}', '--dry_run')
  assert f' {accelerator} --runtime-version={runtime} ' in result.stdout
  assert '--node-id=het' in result.stdout


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['start', *WHERE], "the first argument is 'start'"),
    (['create', *WHERE, '--topology=v5e:4by4'], '--topology=v5e:4by4 is unknown'),
    (['create', *WHERE, '--topology=v5e:2x8'], 'there is no 2x8 slice of v5e; the nearest'),
    (['create', *WHERE, '--topology=tpu7x:2x2x1'], 'queued resources are of v2, v3, v4,'),
  ],
)
def test_one_sentence_for_a_wrong_setting(cloud, arguments, words):
  result = cloud.script(*arguments)
  assert result.returncode == 2 and not cloud.calls
  assert words in result.stderr and result.stderr.count('\n') == 1


@pytest.mark.parametrize('flag', ['num_slices', 'topology'])
def test_a_value_is_never_run(cloud, flag):
  """Bash evaluates what stands between (( and )), so the whole value must be a number."""
  result = cloud.script(*RUN, f'--{flag}=x[$(touch ran)]=1', *TRAIN)
  assert result.returncode == 2 and not cloud.calls
  assert not (cloud.folder / 'ran').exists()
