"""`soup` and `finetune` on small runs of digits."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from het_plugin import rows, runs, weights
from het_plugin.commands import finetune, soup
from het_plugin.experiments import trainings
from het_plugin.training import checkpoint_reader


@pytest.mark.slow
def test_a_soup_is_a_run_whose_parameters_are_the_mean(digits_run, run_main, tmp_path):
  run, _ = digits_run
  sources = [run / f'checkpoint_{step}' for step in (1, 2)]
  text = run_main(
    soup,
    f'--checkpoint={sources[0]},{sources[1]}',
    '--split=test',
    f'--output_dir={tmp_path}',
    f'--json={tmp_path / "soup.json"}',
    '--batch_size=64',
  )
  assert 'uniform soup' in text and 'greedy soup' in text
  first, second, mean = map(checkpoint_reader.read_params, (*sources, tmp_path / 'uniform'))
  for name, x in mean.items():
    np.testing.assert_allclose(x, (first[name] + second[name]) / 2, rtol=1e-6, atol=1e-7)
  rows = {row['candidate']: row for row in json.loads((tmp_path / 'soup.json').read_text())['rows']}
  greedy, best = (
    next(row['precision_at_1'] for name, row in rows.items() if name.startswith(start))
    for start in ('greedy', 'best')
  )
  assert greedy >= best
  opened = runs.open_run(tmp_path / 'uniform').params  # as every main does
  np.testing.assert_array_equal(opened['head']['kernel'], mean['head/kernel'])
  message = run_main(soup, f'--checkpoint={run}', f'--output_dir={tmp_path}', code=2)
  assert f'{tmp_path}/greedy ' in message and '--output_dir' in message
  other = shutil.copytree(run, tmp_path / 'other')
  config = other / 'config.gin'
  config.write_text(f'{config.read_text()}\nHetXL.temperature = @FixedTemperature()\n')
  files = f'--checkpoint={run},{other}', f'--output_dir={tmp_path / "soup"}'
  assert 'other and ' in (message := run_main(soup, *files, code=2))
  assert 'differ in HetXL.temperature' in message
  shutil.copy(run / 'config.gin', other)
  names = (other / 'class_names.txt').read_text().splitlines()
  (other / 'class_names.txt').write_text(''.join(f'{name}\n' for name in reversed(names)))
  message = run_main(soup, *files, code=2)
  assert f'{other}' in message and 'does not have the names, in their order' in message


def test_a_fine_tuning_has_a_local_folder(run_main):
  message = run_main(finetune, '--checkpoint=run', '--output_dir=gs://b/x', code=2)
  assert '--output_dir=gs://b/x must be a local directory' in message


def test_all_candidates_are_trained_on_one_task_that_their_model_fits(tmp_path):
  model = trainings.Training(
    [f'het_plugin/gin/{name}.gin' for name in ('runs/digits_smoke', 'heads/det')]
  )
  task = "MIXTURE_OR_TASK_NAME = 'glyphs_core'"
  other = dataclasses.replace(model, gin_bindings=[task, 'NUM_CLASSES = 2297'])
  none = finetune.combinations([])
  with pytest.raises(
    ValueError, match="on 'glyphs_core' and 'digits', each .*--gin.MIXTURE_OR_TASK_NAME"
  ):
    finetune._check_runs([], [model, other], none, tmp_path)
  with pytest.raises(ValueError, match='Det.num_classes=10 must be .* the task, [0-9]+ '):
    finetune._check_runs([task], [dataclasses.replace(model, gin_bindings=[task])], none, tmp_path)


def test_the_splits_of_an_ensemble_are_those_of_the_task():
  finetune._check_splits('digits', split='train[90%:]', test_split='test')
  with pytest.raises(ValueError, match=r"--split=validation: .* choose from \['test', 'train'\]"):
    finetune._check_splits('digits', split='validation', test_split='test')


def test_candidates_of_a_task_with_votes_are_ranked_by_the_most_frequent_label():
  features = np.array([[0.0], [0.1], [5.0], [5.1]], np.float32)
  labels = np.array([[0, 0, 1], [0, 1, 0], [1, 1, -1], [1, -1, -1]], np.int32)
  read = rows.Rows({'features': features}, labels, np.arange(4))
  assert finetune._accuracy(read, [1], 'euclidean') == 1.0


@pytest.mark.parametrize('sources', ['/runs/a,runs/b', '../../runs/a,../b/c', 'runs/a/b,runs/a_b'])
def test_candidates_have_folders_of_their_own_in_the_output_directory(run_main, tmp_path, sources):
  asked = finetune, f'--checkpoint={sources}', f'--output_dir={tmp_path}'
  assert 'names of folders inside --output_dir: give --names' in run_main(*asked, code=2)


def test_predictions_of_a_setting_with_brackets_are_found(tmp_path):
  (setting,) = finetune.combinations(['vit.axes=[1, 2]'])
  made = tmp_path / 'predictions/test' / f'run_{setting}'
  made.mkdir(parents=True)
  assert finetune._predicted(tmp_path, f'run/{setting}') == [made]


def test_every_combination_of_a_sweep():
  found = finetune.combinations(['LEARNING_RATE=0.1,0.01', 'a/B.c=(1, 2)'])
  assert found == {
    'LEARNING_RATE=0.1,a_B.c=(1, 2)': ['LEARNING_RATE = 0.1', 'a/B.c = (1, 2)'],
    'LEARNING_RATE=0.01,a_B.c=(1, 2)': ['LEARNING_RATE = 0.01', 'a/B.c = (1, 2)'],
  }
  assert finetune.combinations([]) == {'default': []}
  with pytest.raises(ValueError, match='--sweep=LEARNING_RATE .*NAME=VALUE'):
    finetune.combinations(['LEARNING_RATE'])


@pytest.mark.slow
def test_the_best_candidates_are_fine_tuned_and_selected(digits_run, run_main, tmp_path):
  """And a fine-tuning that was interrupted goes on, without what it had predicted."""
  run, _ = digits_run
  asked = finetune, f'--checkpoint={run / "checkpoint_1"},{run / "checkpoint_2"}'
  wrong = run_main(*asked, '--sweep=LR=1e-3,1e-2', f'--output_dir={tmp_path / "wrong"}', code=2)
  assert 'LR = 0.001 is used by nothing: did you mean LEARNING_RATE?' in wrong
  sigmoid = "--gin.HetXL.link='sigmoid'", f'--output_dir={tmp_path / "wrong"}'
  assert '--gin.HetXL.link="\'softmax\'"' in run_main(*asked, *sigmoid, code=2)
  swept = "--sweep=HetXL.link='softmax','sigmoid'", sigmoid[1]
  assert '--gin.HetXL.link="\'softmax\'"' in run_main(*asked, *swept, code=2)
  arguments = (
    *asked,
    '--keep=1',
    '--sweep=LEARNING_RATE=1e-3,1e-2',
    '--split=test',
    '--batch_size=64',
    '--gin.TRAIN_STEPS=3',
    f'--output_dir={tmp_path}',
    f'--json={tmp_path / "result.json"}',
  )
  text = run_main(*arguments)
  result = (tmp_path / 'result.json').read_text()
  found = json.loads(result)
  (kept,) = found['kept']
  assert found['proxy'][kept] == max(found['proxy'].values())
  assert {row['candidate'] for row in found['members']} <= {
    f'{kept}/LEARNING_RATE={rate}' for rate in ('1e-3', '1e-2')
  }
  assert 'greedy ensemble' in text and 'leave-one-out kNN accuracy' in text
  trained = tmp_path / 'runs' / kept / 'LEARNING_RATE=1e-2'
  params, start = map(checkpoint_reader.read_params, (trained, run / kept.split('/')[-1]))
  moved = [np.abs(x - start[name]).max() for name, x in params.items() if 'backbone' in name]
  assert 0 < max(moved) < 0.05  # a few small steps from the candidate

  shutil.rmtree(trained / 'checkpoint_3')
  (trained / 'done.json').unlink()
  (predicted,) = tmp_path.glob('predictions/test/*1e-2/*.npz')
  predicted.write_bytes(b'of another training')
  assert run_main(*arguments).endswith(text)
  assert (tmp_path / 'result.json').read_text() == result
  for name, x in checkpoint_reader.read_params(trained / 'checkpoint_3').items():
    np.testing.assert_array_equal(x, params[name])


@pytest.mark.slow
def test_a_published_candidate_is_fine_tuned_with_a_fresh_head(digits_run, run_main, tmp_path):
  params = checkpoint_reader.read_params(digits_run[0])
  params['head/kernel'] = params['head/kernel'] + 1
  weights.write_arrays(tmp_path / 'vit.npz', weights.export_params(params, 10, 2))
  run_main(
    finetune,
    f'--checkpoint={tmp_path / "vit.npz"}',
    '--keep=all',
    '--split=test',
    '--gin_file=gin/runs/digits_smoke.gin',
    '--gin_file=gin/heads/het_xl.gin',
    '--gin.vit.width=16',
    '--gin.vit.depth=1',
    '--gin.vit.mlp_dim=16',
    '--gin.vit.num_heads=2',
    '--gin.BATCH_SIZE=8',
    '--gin.TRAIN_STEPS=2',
    '--gin.LEARNING_RATE=1e-3',
    '--gin.SAVE_PERIOD=2',
    '--gin.WARMUP_STEPS=0',
    '--gin.EVAL_PERIOD=2',
    '--gin.EVAL_STEPS=1',
    *(f'--gin.{mode}/Integrator.num_samples=2' for mode in ('train', 'eval')),
    '--batch_size=64',
    f'--output_dir={tmp_path}',
    f'--json={tmp_path / "result.json"}',
  )
  found = json.loads((tmp_path / 'result.json').read_text())
  (kept,) = found['kept']
  assert [row['candidate'] for row in found['members']] == [f'{kept}/default']
  trained = checkpoint_reader.read_params(tmp_path / 'runs' / kept / 'default')
  moved = {name: np.abs(x - params[name]).max() for name, x in trained.items()}
  assert 0 < max(x for name, x in moved.items() if 'backbone' in name) < 0.05
  assert moved['head/kernel'] > 0.9  # it begins anew
