"""What soak finds in runs made by hand, and a small real soak."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from het_plugin.training import checkpoints
from het_plugin.training.state import TrainState
from launch import soak

ROOT = Path(__file__).parents[2]
METRICS = [
  row
  for step in range(1, 5)
  for row in (
    {'step': step, 'train/loss': 2.0 / step, 'train/timing/ms_per_step': 5.0},
    {'step': step, 'training_eval/digits/loss': 3.0 / step},
  )
]


def write_metrics(folder, rows):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return folder


def write_checkpoint(folder, step=4, kernel=(0.5, 1.5), position=8):
  state = TrainState(
    step=jnp.int32(step),
    params={'head': {'kernel': jnp.array(kernel), 't': jnp.float32(0.25)}},
    opt_state={'count': jnp.int32(step), 'mu': jnp.zeros(2)},
    optimizer_def=None,
    params_axes=None,
  )
  checkpointer = checkpoints.Checkpointer(folder, checkpoints.SaveCheckpointConfig(period=1))
  checkpointer.save(step, state, {'position': position}, {'evaluated': True})
  checkpointer.close()
  return folder


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  return write_metrics(write_checkpoint(tmp_path_factory.mktemp('reference')), METRICS)


@pytest.mark.parametrize(
  ('settings', 'rows', 'words'),
  [
    ({}, [{'step': 0, 'train/timing/compile_seconds': 1.0}, *METRICS], None),
    ({'kernel': (0.5, 1.5000001)}, METRICS, 'params/head/kernel differs'),
    ({'position': 10}, METRICS, "the input position is {'position': 10}, not {'position': 8}"),
    ({}, [{'step': 1, 'train/loss': 2.0000000000000004}, *METRICS[1:]], '"train/loss": 2.00000000'),
  ],
)
def test_one_bit_of_a_run(reference, tmp_path, settings, rows, words):
  run = write_metrics(write_checkpoint(tmp_path, **settings), rows)
  found, compared = soak.compare(reference, run)
  if words is None:
    assert (found, compared) == ([], {'arrays': 5, 'metric_lines': 8})
  else:
    assert len(found) == 1 and words in found[0]


def test_rounds_follow_the_seed():
  rounds = soak.plan(39, 10, 2, seed=1)
  assert rounds == soak.plan(39, 10, 2, seed=1) != soak.plan(39, 10, 2, seed=2)
  kills = [x for x in rounds if x['signal'] == 'SIGKILL']
  assert len(kills) == 39 and len(rounds) == 49
  assert {x['victim'] for x in kills} == {0, 1, soak.ALL}


def test_a_place_that_cannot_be_written_to_ends_it_before_a_run(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(soak, 'soak', lambda folder, args: pytest.fail('it began'))
  (tmp_path / 'file').touch()
  for flag in ('folder', 'json'):
    path = tmp_path / 'file' if flag == 'folder' else tmp_path
    monkeypatch.setattr(sys, 'argv', ['soak', '--rounds=1', f'--{flag}={path}'])
    assert soak.main() == 2 and f"'{path}'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_killed_ends_like_one_that_is_not(tmp_path):
  """One process with two devices and one kill; tests/commands/test_train.py sends SIGTERM.

  Of two samples, too few for a fit, which takes most of the time to compile. Of 12 steps, not 24.
  """
  out = tmp_path / 'new' / 'soak.json'
  code = 'import sys\nfrom launch import soak\nsoak.STEPS_PER_ROUND = 6\nsys.exit(soak.main())'
  command = [sys.executable, '-c', code, '--rounds=1', '--sigterm_share=0']
  command += ['--processes=1', '--devices=2', f'--folder={tmp_path / "runs"}', f'--json={out}']
  command += ['--', *soak.DEFAULT_TRAINING]
  command += [f'--gin.{mode}/Integrator.num_samples=2' for mode in ('train', 'eval')]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
  assert done.returncode == 0, done.stdout + done.stderr
  result = json.loads(out.read_text())
  assert (result['rounds'], result['sigterm_rounds'], result['mismatches']) == (1, 0, 0)
  assert result['arrays'] > 10 and result['finished']
