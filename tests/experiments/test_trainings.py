"""A run of a study: trained once, read back."""

import json
import math
import os
import signal

import pytest

from het_plugin import reporting
from het_plugin.experiments import trainings
from het_plugin.operations import run_status
from het_plugin.system import exit_codes, run_files, stopping
from het_plugin.training import train


def small_run(**bindings):
  sizes = {'TRAIN_STEPS': 2, 'EVAL_STEPS': 1, 'EVAL_PERIOD': 2}
  sizes |= {'STATS_PERIOD': 1, 'WARMUP_STEPS': 1}
  sizes |= {f'{mode}/Integrator.num_samples': 2 for mode in ('train', 'eval')}
  sizes |= {'vit.width': 16, 'vit.depth': 1, 'vit.mlp_dim': 16, 'BATCH_SIZE': 16} | bindings
  files = ['het_plugin/gin/runs/digits_smoke.gin', 'het_plugin/gin/heads/het_xl.gin']
  return trainings.Training(files, [f'{name} = {value}' for name, value in sizes.items()])


@pytest.mark.slow
def test_a_complete_run_is_not_opened_again(tmp_path, monkeypatch):
  assert trainings.complete(small_run(), tmp_path)
  lines = run_files.read_lines(tmp_path / 'metrics.jsonl')
  final = trainings.final_evaluations(lines)['training_eval/digits']
  assert final['step'] == 2 and 0 < final['nll'] < 20
  assert run_status.curves(lines)['train']['step'] == [1, 2]
  model, counts = trainings.configured_model()
  assert model.head.num_classes == 10 and counts.extra == 2 * 16 * 17 + 50 * 16 + 1
  with monkeypatch.context() as patch:
    patch.setattr(train, 'train', None)
    assert not trainings.complete(small_run(), tmp_path)
  # another evaluation: opened, with nothing left to train
  assert trainings.complete(small_run(EVAL_STEPS=2), tmp_path)
  lines = run_files.read_lines(tmp_path / 'metrics.jsonl')
  again = trainings.final_evaluations(lines)['training_eval/digits']
  assert again['nll'] != final['nll'] and run_status.curves(lines)['train']['step'] == [1, 2]
  with pytest.raises(ValueError, match='WEIGHT_DECAY'):
    trainings.complete(small_run(WEIGHT_DECAY=0.3), tmp_path)


def test_a_signal_at_the_end_of_a_run_keeps_the_next_from_starting(tmp_path, monkeypatch):
  def train_to_the_end(**settings):
    with stopping.handled(lambda: True, lambda: None):
      os.kill(os.getpid(), signal.SIGTERM)
    return 2, None

  monkeypatch.setattr(trainings.starting, 'train_from_gin', train_to_the_end)
  with pytest.raises(exit_codes.Preempted) as preempted:
    trainings.complete(small_run(), tmp_path)
  assert (preempted.value.code, preempted.value.step) == (42, 2)
  assert not trainings.complete(small_run(), tmp_path)  # it is complete


def test_curves_have_every_step_and_damaged_lines_are_told_of(tmp_path, monkeypatch, caplog):
  lines = [json.dumps({'step': n, 'train/loss': 1.0, 'train/tau': 2.0}) for n in (1, 2, 3)]
  (tmp_path / 'metrics.jsonl').write_text('\n'.join([*lines, '{', '']))
  monkeypatch.setattr(run_files, 'TAIL_BYTES', 70)
  drawn = []
  monkeypatch.setattr(reporting, 'curve_pngs', drawn.append)
  trainings.draw_curves({'det': tmp_path}, '')
  assert drawn == [{'det': {'step': [1, 2, 3], 'loss': [1.0] * 3, 'tau': [2.0] * 3}}]
  assert 'line 4 is damaged' in caplog.text


def test_the_last_evaluations_count():
  lines = [
    {'step': 1, 'training_eval/digits/nll': 2.0, 'infer_eval/shift/nll': 3.0},
    {'step': 2, 'training_eval/digits/nll': None, 'train/loss': 1.0},
  ]
  got = trainings.final_evaluations(lines)
  assert got['infer_eval/shift'] == {'step': 1, 'nll': 3.0}
  assert got['training_eval/digits']['step'] == 2
  assert math.isnan(got['training_eval/digits']['nll']) and len(got) == 2
