"""Where a run stands: directories made by hand, for every state and for what is cut short."""

import json
import math

import pytest

from het_plugin.operations import run_status, status_report
from het_plugin.system import run_files

NOW = 2_000_000_000.0


def facts_of(folder, process=0, number=1, seconds_ago=2.0, **changes):
  """Writes the facts of a process of an attempt that began 150 s before."""
  value = {
    'process': process,
    'processes': 1,
    'host': 'host-0',
    'pid': 77,
    'beat': 9,
    'began': NOW - seconds_ago - 150,
    'time': NOW - seconds_ago,
    'total_steps': 400,
    'phase': 'step',
    'idle_seconds': 0.0,
    'ticks': 1000,
    'state': 'running',
    'message': '',
    'seconds': {'start': 20, 'compile': 30, 'step': 80, 'data': 5, 'evaluate': 15},
    'start_step': 100,
    'step': 300,
    'saved_step': 200,
    'exit_code': None,
  }
  path = folder / 'attempts' / f'attempt_{number:04d}' / f'process-{process:05d}.json'
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(value | changes))


def write_lines(path, *values):
  path.write_text(''.join(json.dumps(value) + '\n' for value in values))


def checkpoint(folder, step, seconds_ago):
  path = folder / f'checkpoint_{step}'
  (path / 'state' / 'd').mkdir(parents=True)
  (path / 'state' / 'd' / 'array').write_bytes(bytes(1000))
  metadata = json.dumps({'commit_timestamp_nsecs': int((NOW - seconds_ago) * 1e9)})
  (path / '_CHECKPOINT_METADATA').write_text(metadata)
  return 1000 + len(metadata)


def read(folder, **settings):
  facts = run_status.read(folder, now=NOW, **settings)
  json.dumps(facts, allow_nan=False)
  return facts


def state(folder, **settings):
  return read(folder, **settings)['state']


def test_brackets_in_brackets_are_no_facts(tmp_path):
  facts_of(tmp_path)
  nested = '[' * 100_000
  (tmp_path / 'metrics.jsonl').write_text(nested + '\n')
  (tmp_path / 'attempts/attempt_0001/process-00001.json').write_text(nested)
  found = read(tmp_path)
  assert len(found['processes']) == 1 and 'line 1 is damaged' in found['problems'][0]


@pytest.mark.parametrize(
  'changes',
  [
    {'step': 'x'},
    {'step': -1},
    {'step': True},
    {'total_steps': 10**400},
    {'seconds': []},
    {'seconds': {'step': None}},
    {'seconds': {'step': 1e300}},
    {'began': float('nan')},
    {'time': 1e300},
    {'message': None},
    {'host': {}},
    {'state': '\x1b[2J'},
    {'of another version': 1},
  ],
  ids=str,
)
def test_facts_of_other_types_are_no_facts(tmp_path, changes):
  facts_of(tmp_path)
  facts_of(tmp_path, number=2, **changes)
  found = read(tmp_path)
  assert [row['attempt'] for row in found['attempts']] == [1]
  assert status_report.text(found) and status_report.page(found)


@pytest.mark.parametrize(
  'value',
  ['x', True, [], {}, float('nan'), float('inf'), 1e308, 10**400, -(10**400), None],
  ids=str,
)
def test_metrics_of_other_types_are_unknown(tmp_path, value):
  facts_of(tmp_path)
  names = ['data/corrupt_records', 'train/timing/ms_per_step', 'train/loss', 'training_eval/x/step']
  write_lines(
    tmp_path / 'metrics.jsonl', {'step': 9} | dict.fromkeys(names, value), {'step': value}
  )
  (tmp_path / 'checkpoint_9').mkdir()
  (tmp_path / 'checkpoint_9' / '_CHECKPOINT_METADATA').write_text(
    json.dumps({'commit_timestamp_nsecs': value})
  )
  found = read(tmp_path)
  assert found['metrics'].get('loss') is None and found['checkpoint']['age_seconds'] is None
  assert status_report.text(found) and status_report.page(found)


def test_a_terminal_obeys_no_text_of_a_run(tmp_path):
  run = tmp_path / 'run\x1b[2J'
  hidden = 'a\x1b]0;x\x07b\x9bc\r\n! fine\u202ed'
  facts_of(run, state='failed', message=hidden, host=hidden)
  write_lines(run / 'metrics.jsonl', {'step': 9, f'training_eval/{hidden}/nll': 1.0})
  found = read(run)
  assert found['message'] == hidden  # as it is for programs
  text = status_report.text(found)
  assert r'a\x1b]0;x\x07b\x9bc\r ! fine\u202ed' in text
  assert all(c.isprintable() or c == '\n' for c in text) and '\n! fine' not in text


# States.


def test_running(tmp_path):
  facts_of(tmp_path)
  facts = read(tmp_path)
  assert (facts['state'], facts['step'], facts['total_steps']) == ('running', 300, 400)
  assert facts['percent'] == 75.0
  assert facts['seconds_per_step'] == 100 / 200  # steps, data and evaluations
  assert facts['eta_seconds'] == 50.0
  assert facts['problems'] == []
  write_lines(tmp_path / 'metrics.jsonl', {'step': 0, 'train/timing/compile_seconds': 12.5})
  assert '\ntraining\n' in status_report.text(read(tmp_path))  # no losses yet


def test_a_run_of_no_steps(tmp_path):
  facts_of(tmp_path, state='done', total_steps=0, start_step=0, step=0)
  assert status_report.headline(read(tmp_path)).startswith('done: step 0 of 0, last sign')


def test_starting(tmp_path):
  facts_of(tmp_path, phase='restore', start_step=None, step=0, seconds={'start': 5})
  write_lines(tmp_path / 'metrics.jsonl', {'step': 120, 'train/loss': 1.0})
  facts = read(tmp_path)
  assert (facts['state'], facts['step'], facts['eta_seconds']) == ('starting', 120, None)


@pytest.mark.parametrize('how', ['done', 'preempted', 'failed'])
def test_ended(tmp_path, how):
  facts_of(tmp_path, seconds_ago=5000, state=how, message='why')
  facts = read(tmp_path)
  assert (facts['state'], facts['message'], facts['eta_seconds']) == (how, 'why', None)
  assert facts['problems'] == (['The run failed: why.'] if how == 'failed' else [])
  assert facts['attempts'][0]['ended'] == how


def test_killed(tmp_path):
  facts_of(tmp_path, seconds_ago=90)
  facts = read(tmp_path)
  assert (facts['state'], facts['seconds_since_sign_of_life']) == ('stale', 90.0)
  assert facts['problems'] == ['No sign of life for 0:01:30: it was killed, or it hangs.']
  assert facts['attempts'][0]['ended'] == 'killed'
  assert state(tmp_path, stale_seconds=120) == 'running'


def test_only_checkpoints_are_left(tmp_path):
  size = checkpoint(tmp_path, 400, 50)
  facts = read(tmp_path)
  assert (facts['state'], facts['step'], facts['total_steps']) == ('stale', 400, None)
  assert facts['checkpoint'] == {'step': 400, 'age_seconds': 50.0, 'bytes': size}
  assert facts['goodput'] is None and facts['processes'] == facts['attempts'] == []


# Processes.


def test_a_silent_process(tmp_path):
  facts_of(tmp_path, 0, processes=2, idle_seconds=70)
  facts_of(tmp_path, 1, seconds_ago=75, processes=2, ticks=990)
  facts = read(tmp_path)
  assert facts['state'] == 'running'
  assert [row['is_silent'] for row in facts['processes']] == [False, True]
  assert facts['problems'] == ['Silent: process 1.', 'The others wait for process 1.']


# Everything else.


def test_metrics_and_evaluations_are_the_last_ones(tmp_path):
  facts_of(tmp_path)
  write_lines(
    tmp_path / 'metrics.jsonl',
    {'step': 0, 'train/timing/compile_seconds': 12.5},
    {'step': 10, 'train/loss': 2.0, 'train/tau': 1.5, 'train/timing/data_wait_share': 0.2},
    {'step': 10, 'training_eval/digits/nll': 2.1, 'training_eval/digits/tau': 0.1},
    {'step': 10, 'fewshot/digits/1shot': 0.4, 'zeroshot/pairs/image_to_text/recall1': 0.3},
    {'step': 20, 'training_eval/digits/nll': 1.9, 'training_eval/digits/ece': 0.2},
    {'step': 20, 'data/corrupt_records': 3},
    {'step': 30, 'train/loss': None, 'train/tau': 1.4, 'train/timing/data_wait_share': 0.25},
    {'step': 30, 'goodput/share': 0.5},
  )
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 40, "train/lo')
  (tmp_path / 'logs').mkdir()
  unreadable = 'Unreadable image {}: its row is masked (1 so far).'
  for process, names in enumerate((['a/1.png', 'a b.png'], ['a/1.png'])):
    path = tmp_path / 'logs' / f'process-{process:05d}.jsonl'
    write_lines(path, *({'step': 0, 'message': unreadable.format(name)} for name in names))
  facts = read(tmp_path)
  assert facts['metrics_step'] == 30
  assert facts['metrics'] == {
    'loss': None,
    'tau': 1.4,
    'data_wait_share': 0.25,
    'compile_seconds': 12.5,
  }
  assert facts['evaluations'] == {
    'training_eval/digits': {'step': 20, 'nll': 1.9, 'ece': 0.2},
    'fewshot/digits': {'step': 10, '1shot': 0.4},
    'zeroshot/pairs/image_to_text': {'step': 10, 'recall1': 0.3},
  }
  assert facts['problems'] == [
    'loss is not finite at step 30.',
    'Training waits for data 25% of its time.',
    'Records that could not be read: 3 (a/1.png, a b.png, ...).',
  ]
  curves = run_status.curves(run_files.read_lines(tmp_path / 'metrics.jsonl'))
  assert curves == {
    'train': {
      'step': [10, 30],
      'loss': [2.0, pytest.approx(math.nan, nan_ok=True)],
      'tau': [1.5, 1.4],
      'precision_at_1': [pytest.approx(math.nan, nan_ok=True)] * 2,
    }
  }
  page = status_report.page(facts)
  assert page.index('a b.png') < page.index('<table>') < page.index('image/png')


def test_checkpoints(tmp_path):
  facts_of(tmp_path)
  checkpoint(tmp_path, 100, 90)
  size = checkpoint(tmp_path, 200, 30)
  (tmp_path / 'checkpoint_300.orbax-checkpoint-tmp').mkdir()
  (tmp_path / 'unreadable_checkpoint_150').mkdir()
  facts = read(tmp_path)
  assert facts['checkpoint'] == {'step': 200, 'age_seconds': 30.0, 'bytes': size}
  assert facts['problems'] == ['Checkpoints that could not be read were set aside: 150.']


def test_reports_of_guard_rails(tmp_path):
  facts_of(tmp_path)
  (tmp_path / 'nonfinite').mkdir()
  for step in (90, 110):
    (tmp_path / 'nonfinite' / f'step_{step}.json').write_text('{}')
  (tmp_path / 'config_until_50.gin').touch()
  (tmp_path / 'profile_request').touch()
  (tmp_path / 'profile' / 'plugins' / 'profile' / 'step_12').mkdir(parents=True)
  facts = read(tmp_path)
  assert facts['nonfinite_steps'] == [90, 110] and facts['configs_until'] == [50]
  assert facts['profile_is_requested'] and facts['profiles'] == ['step_12']
  assert facts['problems'] == ['2 steps not finite, the last one 110.']


def test_files_that_are_being_written_or_are_something_else(tmp_path):
  facts_of(tmp_path)
  (tmp_path / 'attempts/attempt_0001/process-00001.json').write_text('{"process": 1, "ti')
  (tmp_path / 'attempts/attempt_0001/process-00002.json').write_text('{}')
  (tmp_path / 'attempts/attempt_0002').mkdir()
  (tmp_path / 'metrics.jsonl').write_bytes(b'not JSON\n[1, 2]\n{"no step": 1}\n\xff\n{"step": 3}\n')
  facts = read(tmp_path)
  assert len(facts['processes']) == len(facts['attempts']) == 1
  assert facts['state'] == 'running' and facts['metrics'] == {}
  damaged = f'{tmp_path}/metrics.jsonl: line 1 and 3 more are damaged and left out.'
  assert facts['problems'][0] == damaged


@pytest.mark.parametrize('kind', ['nothing', 'empty', 'runs'])
def test_what_is_no_run(tmp_path, kind):
  path = tmp_path / 'run'
  if kind != 'nothing':
    path.mkdir()
  if kind == 'runs':  # a folder of runs
    (path / 'het_xl').mkdir()
    (path / 'het_xl' / 'metrics.jsonl').touch()
  words = 'exist' if kind == 'nothing' else 'config.gin'
  with pytest.raises(ValueError, match=f'RUN_DIR={path} .*{words}'):
    run_status.read(path)
