"""The main, as a user runs it, on runs of a few steps."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from het_plugin import data, runs
from het_plugin import rows as rows_lib
from het_plugin.commands import evaluate, noise_test, select
from het_plugin.data import task_info


@pytest.mark.slow
def test_a_report_of_two_checkpoints(run_main, digits_run, tmp_path):
  run_dir, _ = digits_run
  output = tmp_path / 'out'
  other = tmp_path / 'other.npz'
  rng = np.random.default_rng(0)
  np.savez(other, image=rng.random((30, 8, 8, 3)), label=np.arange(30))
  printed = run_main(
    evaluate,
    f'--checkpoint={run_dir}',
    f'--checkpoint={run_dir}/checkpoint_1',
    f'--ood_dataset=npz:{other}',
    '--ood_split=train',
    f'--output_dir={output}',
    '--batch_size=64',
    '--covariance_index=7,3',
    '--save_predictions',
    '--gin.eval/Integrator.num_samples=3',
    f'--json={tmp_path / "rows.json"}',
  )
  assert '359 examples of digits, split test.' in printed and 'difference to the first' in printed
  rows = json.loads((tmp_path / 'rows.json').read_text())
  assert rows == json.loads((output / 'results.json').read_text())
  newest, first = rows
  assert (newest['name'], first['name']) == ('het_xl', 'het_xl/checkpoint_1')
  assert (newest['num_examples'], newest['num_ood_examples'], newest['num_samples']) == (359, 27, 3)
  assert set(newest['ood']) == {'max_prob', 'entropy', 'mutual_information'}
  assert first['difference']['nll'] == pytest.approx(first['nll'] - newest['nll'])
  assert [look['index'] for look in first['covariance']] == [7, 3]
  look = first['covariance'][0]
  assert np.shape(look['correlation']) == (8, 8) and len(look['most_correlated']) == 9
  page = (output / 'index.html').read_text()
  assert page.count('<img') == 2 + 3 + 4 and '<th scope="col">checkpoint</th>' in page
  assert {x.name for x in output.glob('*.png')} == {
    'reliability.png',
    'risk_coverage.png',
    'roc_max_prob.png',
    'roc_entropy.png',
    'roc_mutual_information.png',
    *(f'covariance_het_xl{x}_{i}.png' for x in ('', '_checkpoint_1') for i in (3, 7)),
  }
  assert (output / 'results.txt').read_text().strip() in printed

  # What was saved gives the same numbers, without the model.
  saved = [str(output / 'predictions' / f'{x}.npz') for x in ('het_xl', 'het_xl_checkpoint_1')]
  predictions = rows_lib.read(saved[0], 'log_prob')
  assert predictions.log_prob.shape == (359, 10) and predictions.class_names[3] == '3'
  assert predictions.provenance['task'] == 'digits'
  again = (f'--predictions={x}' for x in saved)
  run_main(evaluate, *again, f'--json={tmp_path / "2.json"}')
  for row, again in zip(rows, json.loads((tmp_path / '2.json').read_text()), strict=True):
    for name in ('nll', 'ece', 'brier', 'aurc', 'entropy', 'precision_at_5'):
      assert again[name] == row[name]
    assert again.get('difference') == row.get('difference')

  # A run and the file of its predictions choose the same examples.
  few = f'--predictions={saved[0]}', '--max_examples=100', '--gin.eval/Integrator.num_samples=3'
  again = f'--json={tmp_path / "few.json"}', '--covariance_images=0'
  run_main(evaluate, f'--checkpoint={run_dir}', *few, *again)
  of_run, of_file = json.loads((tmp_path / 'few.json').read_text())
  assert of_run['num_examples'] == 100 and abs(of_file['difference']['nll']) < 1e-6

  run_main(select, 'ensemble', f'--validation={",".join(saved)}', f'--json={tmp_path / "3.json"}')
  found = json.loads((tmp_path / '3.json').read_text())
  best = min(rows, key=lambda row: row['nll'])
  assert found['rows'][1]['validation_nll'] == pytest.approx(best['nll'])
  assert found['rows'][1]['validation_accuracy'] == pytest.approx(best['precision_at_1'])
  assert found['rows'][0]['validation_nll'] <= found['rows'][1]['validation_nll']


def test_a_file_with_the_labels_of_several_people(tmp_path, run_main):
  random = np.random.default_rng(0)
  labels = random.integers(0, 4, (50, 3))
  shares = (labels[..., None] == np.arange(4)).mean(1)
  probability = 0.7 * shares + 0.3 / 4
  file = tmp_path / 'votes.npz'
  np.savez(file, log_prob=np.log(probability), label=labels)
  printed = run_main(evaluate, f'--predictions={file}', f'--json={tmp_path / "out.json"}')
  (row,) = json.loads((tmp_path / 'out.json').read_text())
  nll = -(shares * np.log(probability)).sum(1).mean()
  assert row['agreement']['soft_label_nll'] == pytest.approx(nll, rel=1e-5)
  assert row['agreement']['disagreement_correlation'] == pytest.approx(1.0)
  assert 'labels of several people' in printed


def test_the_notes_explain_the_columns_that_are_shown(tmp_path, run_main):
  label = np.arange(20) % 2
  for name, prob in (
    ('right', 0.1 + 0.8 * np.eye(2)[label]),
    ('half', np.tile([0.9, 0.1], (20, 1))),
  ):
    np.savez(tmp_path / f'{name}.npz', prob=prob, label=label)
    printed = run_main(evaluate, f'--predictions={tmp_path}/{name}.npz')
    assert printed.count('AUROC errors') == (0 if name == 'right' else 2)
    assert 'entropy: of the predictive' in printed and 'MI' not in printed
  np.savez(tmp_path / 'each.npz', prob=np.tile([0.9, 0.1], (20, 1)), label=label, link='sigmoid')
  of_both = (f'--predictions={tmp_path}/{name}.npz' for name in ('half', 'each'))
  printed = run_main(evaluate, *of_both)
  assert 'cannot be compared with those of a softmax' in printed
  assert 'of a sigmoid, whose rows have a ranking AP, the share of these classes' in printed


def test_a_bounded_choice_of_a_file_is_not_its_first_rows(tmp_path, run_main):
  file = tmp_path / 'p.npz'
  out = tmp_path / 'out.json'
  np.savez(file, prob=np.tile([0.8, 0.1, 0.1], (60, 1)), label=np.arange(60) // 20)
  run_main(evaluate, f'--predictions={file}', '--max_examples=20', f'--json={out}')
  (row,) = json.loads(out.read_text())
  assert row['num_examples'] == 20 and 0 < row['precision_at_1'] < 0.7


@pytest.mark.slow
def test_votes_are_evaluated_as_in_training(digits_run, run_main, tmp_path):
  """A checkpoint, the file of its predictions, and the model's own evaluation agree."""
  run_dir, _ = digits_run
  rng = np.random.default_rng(0)
  images = rng.random((64, 8, 8, 1))
  labels = rng.integers(0, 10, (64, 3))
  weight = np.full(labels.shape, 1 / 3, np.float32)
  split = np.array(['train', 'test'] * 32)
  arrays = {'image': images, 'label': labels, 'label_weight': weight, 'split': split}
  np.savez(tmp_path / 'votes.npz', class_name=[str(k) for k in range(10)], **arrays)
  task = f'npz:{tmp_path}/votes.npz'
  out = tmp_path / 'out'
  printed = run_main(
    evaluate,
    f'--checkpoint={run_dir}',
    f'--dataset={task}',
    '--split=test',
    '--batch_size=32',
    '--save_predictions',
    f'--output_dir={out}',
    '--covariance_images=1',
  )
  assert 'labels of several people' in printed and 'drawn from their shares' in printed
  (row,) = json.loads((out / 'results.json').read_text())
  assert len(row['covariance']) == 1 and 'no_covariance' not in row
  run = runs.open_run(run_dir)
  with run.open_split('test', task=task, batch_size=32) as (batches, _):
    _, metrics = jax.jit(run.model.eval_fn)(run.params, next(batches))
  for name, ours in (('nll', 'nll'), ('precision_at_1', 'precision_at_1'), ('ece', 'ece')):
    assert row[ours] == pytest.approx(float(metrics[name].compute()), rel=1e-4)
  file = out / 'predictions' / 'het_xl.npz'
  run_main(evaluate, f'--checkpoint={file}', f'--json={tmp_path / "again.json"}')
  (again,) = json.loads((tmp_path / 'again.json').read_text())
  assert again['agreement'] == row['agreement'] and again['nll'] == row['nll']


@pytest.mark.slow
def test_accuracy_on_the_true_classes_where_a_task_knows_them(
  digits_run, run_main, tmp_path, monkeypatch
):
  run_dir, _ = digits_run
  with_truth = dataclasses.replace(
    task_info('digits'), true_classes=lambda split, ids: {'test': ids % 10}[split]
  )
  monkeypatch.setattr(data, 'classification_info', lambda task: with_truth)
  found = {}
  for name, integrator in (('noise', '@eval/Integrator()'), ('location', '@Location()')):
    out = tmp_path / name
    printed = run_main(
      evaluate,
      f'--checkpoint={run_dir}',
      '--split=test[:300]',
      '--covariance_images=0',
      f'--gin.ClassificationModel.eval_integrator={integrator}',
      f'--output_dir={out}',
      '--save_predictions',
    )
    assert 'true classes' in printed and 'clean_accuracy_location' in printed
    (found[name],) = json.loads((out / 'results.json').read_text())
    rows = rows_lib.read(str(out / 'predictions' / 'het_xl.npz'), 'log_prob')
    assert set(rows.columns) <= {'log_prob', 'expected_entropy'}
    truth = rows.index % 10
    row = found[name]['truth']
    right = rows.log_prob.argmax(axis=1) == truth
    assert len(truth) == 300 and row['clean_accuracy'] == right.mean()
    assert row['wrong_labels'] == (rows.label != truth).mean()
    assert row['stderr']['clean_accuracy'] == pytest.approx(right.std(ddof=1) / 300**0.5)
  # Both runs know the location; one evaluates it.
  location = found['location']['truth']
  assert location['clean_accuracy'] == location['clean_accuracy_location']
  assert found['noise']['truth']['clean_accuracy_location'] == location['clean_accuracy']


@pytest.mark.slow
def test_what_noise_would_gain_over_a_run(digits_det_run, digits_run, run_main, tmp_path):
  run_dir, params = digits_det_run
  arguments = '--split=train', f'--json={tmp_path / "out.json"}'
  printed = run_main(noise_test, f'--checkpoint={run_dir}', *arguments)
  rows = json.loads((tmp_path / 'out.json').read_text())
  assert [row['head'] for row in rows] == ['het', 'het_h', 'het_xl', 'hidden layer']
  row = rows[2]
  assert f'HET-XL would gain {row["gain"]:.4f} ± ' in printed and 'det: fitting W' in printed
  # The location that the test starts from is that of the model.
  run = runs.open_run(run_dir)
  labelled = run.rows('train', ('log_prob',))
  nll = -labelled.log_prob[np.arange(len(labelled.label)), labelled.label].mean()
  assert row['num_rows'] == len(labelled.label) and params['head']['kernel'].shape[1] >= 10
  assert row['nll_det'] + row['refit'] == pytest.approx(nll, abs=1e-4)
  for arguments, message in {
    (f'--checkpoint={digits_run[0]}',): 'has HetXL',
    (f'--checkpoint={run_dir}', '--C=2'): '--C has no effect on --checkpoint',
    (): '--train or --checkpoint is needed',
  }.items():
    assert message in run_main(noise_test, *arguments, code=2)
  assert 'samples S' not in run_main(evaluate, f'--checkpoint={run_dir}')  # there is no noise


def test_glyphs_are_shown_and_their_look_alikes_known():
  info = task_info('glyphs_core')
  names = info.shown_names
  assert names[32] == 'A  LATIN CAPITAL LETTER A' and len(names) == info.num_classes
  assert task_info('digits').shown_names is None and task_info('digits').look_alikes is None
  assert task_info('glyphs_noisy').shown_names == names
  whole, part = (info.look_alikes(split, 28) for split in ('validation', 'validation[:9]'))
  assert whole == part and {names[k][0] for k in whole[32]} == set('\u0391\u0410')


def test_settings_that_are_wrong(run_main):
  cases = {
    (): '--checkpoint or --predictions is needed',
    ('--checkpoint=x.npz',): '--checkpoint=x.npz: ',
    ('--checkpoint=x', '--ood_dataset=digits'): '--ood_dataset and --ood_split',
    ('--checkpoint=x', '--save_predictions'): '--save_predictions needs --output_dir',
    ('--checkpoint=x', '--output_dir=gs://b/x'): '--output_dir=gs://b/x must be a local directory',
    (
      '--checkpoint=r/a/b',
      '--checkpoint=r/a_b',
      '--save_predictions',
      '--output_dir=y',
    ): '--save_predictions would write those of a/b and a_b to one file',
    ('--checkpoint=x', '--covariance_index=1,-2'): '--covariance_index=1,-2 ',
    ('--predictions=x.npz', '--split=test'): '--split needs a --checkpoint: it has no effect on',
    ('--checkpoint=x.npz', '--gin.a=1'): '--gin_bindings has no effect on files of predictions',
    ('--checkpoint=x.npz', '--covariance_index=1'): '--covariance_index needs a --checkpoint',
    ('--predictions=x', '--save_predictions', '--output_dir=y'): '--save_predictions needs a --ch',
  }
  for arguments, message in cases.items():
    assert message in run_main(evaluate, *arguments, code=2)


@pytest.mark.slow
def test_data_that_do_not_fit(run_main, digits_run, tmp_path):
  run_dir, _ = digits_run
  captions = tmp_path / 'captions.npz'
  image = np.zeros((2, 8, 8, 3), np.uint8)
  np.savez(captions, image=image, caption=['a', 'b'], split=['test', 'test'])
  other = shutil.copytree(run_dir, tmp_path / 'other')
  config = other / 'config.gin'
  config.write_text(config.read_text().replace("EVAL_SPLIT = 'test'", "EVAL_SPLIT = 'test[:90%]'"))
  cases = {
    ('--dataset=glyphs_core',): 'HetXL.num_classes=10 ',
    ('--dataset=birds',): "--dataset=birds: mixture_or_task_name is 'birds'",
    (f'--checkpoint={other}',): 'digits, split test[:90%]',
    ('--split=validation',): "split='validation' is not a split of digits",
    ('--split=test', '--ood_dataset=glyphs_core', '--ood_split=train'): (
      '--ood_split=train is endless'
    ),
    ('--split=test', f'--ood_dataset=npz_captions:{captions}', '--ood_split=test'): (
      f"--ood_dataset=npz_captions:{captions}: task is 'npz_captions:{captions}', whose images"
    ),
    (
      '--split=test',
      '--covariance_index=359',
    ): '--covariance_index=359: ',
  }
  for arguments, message in cases.items():
    assert message in run_main(evaluate, f'--checkpoint={run_dir}', *arguments, code=2)
