"""What soak finds in runs made by hand, and a small real one."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from het_plugin.training import checkpoints
from het_plugin.training.state import TrainState
from launch import run_comparison, soak

ROOT = Path(__file__).parents[2]
STEPS, ROWS = 4, 2
METRICS = [
  row
  for step in range(1, STEPS + 1)
  for row in (
    {'step': step, 'train/loss': 2.0 / step, 'train/timing/ms_per_step': 5.0},
    {'step': step, 'training_eval/digits/loss': 3.0 / step},
  )
]


def write_metrics(folder, rows):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def write_checkpoint(folder, step=STEPS, kernel=(0.5, 1.5), temperature=0.25, position=8):
  state = TrainState(
    step=jnp.int32(step),
    params={'head': {'kernel': jnp.array(kernel), 't': jnp.float32(temperature)}},
    opt_state={'count': jnp.int32(step), 'mu': jnp.zeros(2)},
    optimizer_def=None,
    params_axes=None,
  )
  checkpointer = checkpoints.Checkpointer(folder, checkpoints.SaveCheckpointConfig(period=1))
  checkpointer.save(step, state, {'position': position}, {'evaluated': True})
  checkpointer.close()


def begin(step, rows=range(ROWS), shift=0, checksum=7):
  rows = list(rows)
  index = [(step - 1) * ROWS + row + shift for row in rows]
  return {'begin': step, 'rows': rows, 'index': index, 'checksum': [checksum + i for i in index]}


def write_records(folder, *processes):
  """The events of each process; returns the folder."""
  folder.mkdir(parents=True)
  for number, events in enumerate(processes):
    lines = ''.join(json.dumps({'time': 0.0, **event}) + '\n' for event in events)
    (folder / f'process-{number}.jsonl').write_text(lines)
  return folder


def attempt(*steps, resumed=0, **rows):
  return run_comparison.Attempt(
    resumed,
    {
      step: {row: (index, 7 + index) for row, index in enumerate(range(2 * step - 2, 2 * step))}
      for step in steps
    },
    **rows,
  )


REFERENCE = attempt(1, 2, 3, 4)


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  folder = tmp_path_factory.mktemp('reference')
  write_metrics(folder, METRICS)
  write_checkpoint(folder)
  write_records(folder / 'records', [{'at': 0}, *map(begin, range(1, STEPS + 1))])
  return folder


def test_runs_that_agree(reference, tmp_path):
  """The second of which was killed twice, in step 3 and before it had resumed."""
  times = [row | {'train/timing/ms_per_step': 9.0} for row in METRICS if 'train/loss' in row]
  others = [row for row in METRICS if 'train/loss' not in row]
  both = [row for pair in zip(times, others, strict=True) for row in pair]
  write_metrics(tmp_path, [{'step': 0, 'train/timing/compile_seconds': 1.0}, *both])
  write_checkpoint(tmp_path)
  records = [
    write_records(
      tmp_path / 'a', [{'at': 0}, begin(1, [0]), begin(2, [0]), begin(3, [0])],
      [{'at': 0}, begin(1, [1]), begin(2, [1])],
    ),
    write_records(tmp_path / 'b', [], []),
    write_records(tmp_path / 'c', [{'at': 2}, begin(3), begin(4)]),
  ]  # fmt: skip
  with (records[0] / 'process-0.jsonl').open('a') as file:
    file.write('{"time": 1.0, "beg')  # cut short by the kill
  found = run_comparison.compare(reference, tmp_path, reference / 'records', records)
  assert found.differences == []
  assert (found.arrays, found.metric_lines, found.examples) == (5, 8, 8)
  assert found.largest == {'parameters': 0.0, 'metrics': 0.0}


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    (
      {'kernel': (0.5, 1.5000001)},
      'params/head/kernel differs in 1 of 8 bytes, by at most 1.19e-0',
    ),
    ({'temperature': 0.5}, 'params/head/t differs in'),
    ({'temperature': float('nan')}, 'params/head/t differs in'),
    ({'kernel': (0.5, 1.5, 0.0)}, 'params/head/kernel is float32 (3,), not float32 (2,)'),
    ({'position': 10}, "the input position is {'position': 10}, not {'position': 8}"),
    ({'step': 3}, 'the newest checkpoint is checkpoint_3, not checkpoint_4'),
  ],
)
def test_a_bit_of_a_checkpoint(reference, tmp_path, settings, words):
  write_checkpoint(tmp_path, **settings)
  found, *_ = run_comparison.compare_checkpoints(reference, tmp_path, tolerance=None)
  assert len(found) == 1 and words in found[0]


def test_rounding_within_the_tolerance(reference, tmp_path):
  write_checkpoint(tmp_path, kernel=(0.5, 1.50005))
  found, _, largest = run_comparison.compare_checkpoints(reference, tmp_path, tolerance=1e-4)
  assert not found and largest == pytest.approx(5e-5, rel=1e-2)
  assert run_comparison.compare_checkpoints(reference, tmp_path, tolerance=1e-5)[0]


def test_an_integer_has_no_tolerance(reference, tmp_path):
  write_checkpoint(tmp_path, position=9)
  assert run_comparison.compare_checkpoints(reference, tmp_path, tolerance=1e9)[0]


@pytest.mark.parametrize(
  ('rows', 'words'),
  [
    ([*METRICS, METRICS[-1]], 'step 4 has training_eval/digits/loss 2 times, not 1'),
    (METRICS[:2] + METRICS[3:], 'step 2 has train/loss 0 times, not 1'),
    ([*METRICS, {'step': 5, 'train/loss': 0.1}], 'step 5 has train/loss 1 times, not 0'),
    ([METRICS[1], METRICS[0], *METRICS[2:]], 'not in the same order'),
    ([{'step': 1, 'train/loss': 2.0000000000000004}, *METRICS[1:]], 'train/loss=2.000000'),
    ([{'step': 1, 'train/loss': None}, *METRICS[1:]], 'step 1 has train/loss=None, not 2.0'),
  ],
)  # fmt: skip
def test_a_line_of_metrics(reference, tmp_path, rows, words):
  write_metrics(tmp_path, rows)
  found, *_ = run_comparison.compare_metrics(reference, tmp_path, tolerance=None)
  assert len(found) == 1 and words in found[0]


def test_shares_of_examples_are_left_out_of_the_tolerance(tmp_path):
  write_metrics(tmp_path / 'a', [{'step': 1, 'train/precision_at_1': 0.5, 'train/loss': 1.0}])
  write_metrics(tmp_path / 'b', [{'step': 1, 'train/precision_at_1': 0.6, 'train/loss': 1.00005}])
  assert not run_comparison.compare_metrics(tmp_path / 'a', tmp_path / 'b', 1e-4)[0]
  assert len(run_comparison.compare_metrics(tmp_path / 'a', tmp_path / 'b', None)[0]) == 2


@pytest.mark.parametrize(
  ('steps', 'expected'),
  [
    ([([1, 2, 3], 0), ([3, 4], 2)], {1: 0, 2: 0, 3: 1, 4: 1}),
    ([([1, 2, 3], 0), ([3], 2), ([3, 4], 2)], {1: 0, 2: 0, 3: 2, 4: 2}),
    ([([1, 2, 3], 0), ([1], 0), ([4], 3)], {1: 0, 2: 0, 3: 0, 4: 2}),
    ([([1, 2], 0), ([4], 3)], {4: 1}),  # nobody took step 3, and so nothing leads on
  ],
)
def test_which_attempt_took_a_step(steps, expected):
  attempts = [attempt(*taken, resumed=resumed) for taken, resumed in steps]
  assert run_comparison.final_history(attempts, STEPS) == expected


def test_examples():
  assert not run_comparison.compare_examples(
    REFERENCE, [attempt(1, 2), attempt(2, 3, 4, resumed=1)]
  )


def test_a_lost_example():
  second = attempt(3, 4, resumed=2)
  del second.steps[3][1]
  found = run_comparison.compare_examples(REFERENCE, [attempt(1, 2), second])
  assert found == ['step 3 was not trained on its rows [1]']
  # A checkpoint of step 3 from nowhere: the steps before are nobody's.
  found = run_comparison.compare_examples(REFERENCE, [attempt(1, 2), attempt(4, resumed=3)])
  assert found == [f'step {step} was not trained on its rows [0, 1]' for step in (1, 2, 3)]


def test_a_repeated_example():
  second = attempt(3, 4, resumed=2)
  second.steps[3] |= attempt(2).steps[2]
  found = run_comparison.compare_examples(REFERENCE, [attempt(1, 2), second])
  assert 'attempt 2, step 3, row 0: example 2, not 4' in found
  assert 'example 2 was trained on 2 times' in found


def test_an_example_of_other_content():
  """In an attempt whose steps were lost, too."""
  first = attempt(1, 2)
  first.steps[2][0] = (2, 0)
  found = run_comparison.compare_examples(REFERENCE, [first, attempt(1, 2, 3, 4)])
  assert found == ['attempt 1, step 2, row 0: example 2, not 2 (other content)']


@pytest.mark.parametrize(
  ('processes', 'words'),
  [
    ([[{'at': 0}, begin(1)], [{'at': 0}, begin(1, shift=1)]], 'examples in row 0 of step 1'),
    ([[{'at': 0}], [{'at': 2}]], 'resumed from different steps'),
    ([[{'at': 0}, begin(1), begin(1)]], 'process-0 began step 1 twice'),
  ],
)  # fmt: skip
def test_processes_that_contradict_each_other(tmp_path, processes, words):
  made = run_comparison.read_attempt(write_records(tmp_path / 'x', *processes))
  assert any(words in text for text in run_comparison.compare_examples(made, [made]))


SHAPE = soak.Shape(2, 4, 2)


def test_plans_aim_everywhere_and_follow_the_seed():
  plans = soak.make_plans(18, 4, SHAPE, (), seed=1)
  assert plans == soak.make_plans(18, 4, SHAPE, (), seed=1) != soak.make_plans(18, 4, SHAPE, (), 2)
  kills = [plan for plan in plans if plan.signal == 'SIGKILL' and plan.victim != soak.LAUNCHER]
  assert len(kills) == 18 and len(plans) == 22
  assert sorted(plan.aim for plan in kills) == sorted(2 * soak.AIMS)
  assert {plan.victim for plan in kills} == {0, 1, soak.ALL}
  assert {plan.shape for plan in plans} == {SHAPE}


def test_shapes_have_all_or_half_of_the_devices():
  shapes = soak.shapes_for(SHAPE)
  assert {each.processes * each.devices for each in shapes} == {4, 8}
  assert {each.processes for each in shapes} == {1, 2, 4}
  assert {each.partitions for each in shapes} == {1, 2, 4, 8}
  chosen = {plan.shape for plan in soak.make_plans(200, 0, SHAPE, shapes, seed=0)}
  assert chosen == set(shapes)


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (['--rounds=0'], '--rounds=0 must be at least 1'),
    (['--rounds=1', '--num_partitions=3'], '--num_partitions=3 must divide the 4 devices'),
    (['--rounds=1', '--tolerance=0'], '--tolerance=0.0'),
    (['--rounds=1', f'--folder={ROOT}'], 'is not empty'),
  ],
)
def test_one_sentence_for_what_cannot_be(flags, words):
  command = [sys.executable, '-m', 'launch.soak', *flags]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert result.returncode == 2
  assert words in result.stderr and result.stderr.count('\n') == 1


def test_killed_for_real_a_run_ends_as_the_one_nothing_happened_to(tmp_path):
  """One process with two devices, killed twice and preempted once."""
  out = tmp_path / 'soak.json'
  command = [sys.executable, '-m', 'launch.soak', '--rounds=2', '--sigterm_share=0.5']
  command += ['--processes=1', '--devices=2', '--worker=tests.launch.toy_worker']
  command += [f'--folder={tmp_path / "runs"}', f'--json={out}']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
  assert done.returncode == 0, done.stdout + done.stderr
  result = json.loads(out.read_text())
  assert (result['rounds'], result['mismatches']) == (2, 0)
  assert result['kills'] >= 2
  assert 'compared: 17 arrays' in done.stdout
