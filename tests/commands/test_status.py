"""The status main: its text, its page and its JSON say the same, quickly."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from het_plugin.commands import status

ROOT = Path(__file__).resolve().parents[2]


def write_facts(folder, number, process, changes):
  now = time.time()
  value = {
    'process': process,
    'processes': 2,
    'host': f'host-{process}',
    'pid': 5,
    'beat': 9,
    'began': now - 290,
    'time': now,
    'total_steps': 400,
    'step': 300,
    'ticks': 900,
    'start_step': 0,
    'phase': 'data',
    'seconds': {'compile': 90, 'step': 200},
    'idle_seconds': 33.0,
    'state': 'running',
    'message': '',
  }
  attempt = folder / 'attempts' / f'attempt_{number:04d}'
  attempt.mkdir(parents=True, exist_ok=True)
  (attempt / f'process-{process:05d}.json').write_text(json.dumps(value | changes))


@pytest.fixture
def run_dir(tmp_path):
  """A run of two processes that works on step 300 of 400, in its second start."""
  folder = tmp_path / 'run'
  for name in (
    'nonfinite',
    'checkpoint_200',
    'unreadable_checkpoint_250',
  ):
    (folder / name).mkdir(parents=True)
  (folder / 'checkpoint_200' / 'array').write_bytes(bytes(1_500_000))
  now = time.time()
  metadata = json.dumps({'commit_timestamp_nsecs': int(now * 1e9)})
  (folder / 'checkpoint_200' / '_CHECKPOINT_METADATA').write_text(metadata)
  for number, process, changes in (
    (1, 0, {'began': now - 400, 'seconds': {'start': 20, 'step': 80}, 'step': 240}),
    (2, 0, {'start_step': 200}),
    (2, 1, {'start_step': 200, 'ticks': 899}),
  ):
    write_facts(folder, number, process, changes)
  (folder / 'nonfinite' / 'step_290.json').write_text('{}')
  lines = [
    {'step': 290, 'train/loss': 1.25, 'train/tau': 1.5, 'train/timing/examples_per_second': 812.4},
    {'step': 200, 'training_eval/digits/nll': 1.125},
  ]
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return folder


def cells(line):
  return tuple(cell for cell in re.split('  +', line.strip()) if cell)


def test_text_page_and_json_say_the_same(run_dir, tmp_path, run_main):
  out = tmp_path / 'new' / 'status.json'
  text = run_main(status, run_dir, '--json', out, f'--html={tmp_path}/new/status.html')
  facts = json.loads(out.read_text())
  assert facts['run_dir'] == str(run_dir) and text.startswith(
    f'{run_dir}\nrunning: step 300 of 400'
  )
  assert (facts['state'], facts['percent'], facts['eta_seconds']) == ('running', 75.0, 200.0)
  assert '(75%), about 0:03:20 left' in text
  assert [p['is_behind'] for p in facts['processes']] == [False, True]
  assert facts['problems'] == [
    'The others wait for process 1.',
    'Checkpoints that could not be read were set aside: 250.',
    '1 step not finite, the last one 290.',
  ]
  for problem in facts['problems']:
    assert f'! {problem}' in text
  found = {cells(line) for line in text.splitlines()}
  share = 80 * 200 / 240 + 200
  assert facts['goodput']['wall_seconds'] == pytest.approx(400, abs=1)
  assert facts['goodput']['seconds']['training'] == pytest.approx(share)
  assert {
    ('loss', '1.2500'),
    ('tau', '1.500'),
    ('examples/s', '812'),
    ('training_eval/digits', '200', 'nll', '1.125'),
    ('unreadable, set aside', '250'),
    ('steps that were not finite', '290'),
    ('1', 'host-1', '5', 'running', 'data', '300', '33 s', 'now', 'behind'),
    ('training steps', '0:04:27', '66.7%'),
    ('compile', '0:01:30', '22.5%'),
  } <= found
  (checkpoint,) = (cell[1] for cell in found if cell[:1] == ('last complete checkpoint',))
  assert re.fullmatch(r'step 200, (now|0:00:\d\d ago), 1\.5 MB', checkpoint)
  assert f'goodput {facts["goodput"]["share"]:.1%} of 0:06:40, 40 steps repeated' in text
  page = (tmp_path / 'new' / 'status.html').read_text()
  for line in found:
    for cell in line:
      if not set(cell) <= {'-'} and not cell.startswith('!') and cell != str(run_dir):
        assert cell in page, cell


def test_what_is_wrong_is_one_sentence(run_main, tmp_path):
  assert f'RUN_DIR={tmp_path} ' in run_main(status, tmp_path, code=2)
  assert 'RUN_DIR' in run_main(status, code=2)


def test_a_profile_is_asked_for(run_dir, run_main):
  assert re.search('profile +requested', run_main(status, run_dir, '--profile_steps=7'))
  assert json.loads((run_dir / 'profile_request').read_text()) == {'steps': 7}
  message = run_main(status, run_dir, '--profile_steps=7', code=2)
  assert 'profile_request exists: ' in message


def test_watch_looks_again_until_the_run_is_done(tmp_path, run_main, monkeypatch):
  states = iter(['running', 'done'])
  write_facts(tmp_path, 1, 0, {})
  monkeypatch.setattr(
    status.time, 'sleep', lambda _: write_facts(tmp_path, 1, 0, {'state': next(states)})
  )
  text = run_main(status, tmp_path, '--watch=3')
  assert re.findall('(\\w+): step 300 of 400', text) == ['running', 'running', 'done']


def test_it_needs_no_tensorflow_and_no_devices(run_dir):
  """Nor orbax: it answers at once, on machines where a run's devices are busy."""
  code = (
    'import sys\n'
    'from het_plugin.commands import status\n'
    'from het_plugin.operations import run_status, status_report\n'
    f'facts = run_status.read({str(run_dir)!r})\n'
    'status_report.text(facts), status_report.page(facts)\n'
    'from jax._src import xla_bridge\n'
    'assert not xla_bridge.backends_are_initialized()\n'
    'print([m for m in ("tensorflow", "orbax", "seqio") if m in sys.modules])'
  )
  result = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
  )
  assert result.stdout.strip() == '[]'
