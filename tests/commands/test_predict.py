"""`python -m het_plugin.predict` as a user runs it."""

import csv
import dataclasses
import json
import os

import numpy as np
import pytest
from PIL import Image

from het_plugin import data, runs
from het_plugin import rows as rows_lib
from het_plugin.commands import evaluate, predict
from het_plugin.commands.predict import Images, write_csv
from het_plugin.commands.predict import predict as predict_images


@pytest.mark.slow
def test_images_of_a_file_and_of_a_folder(digits_run, run_main, tmp_path):
  run_dir, _ = digits_run
  common = (f'--checkpoint={run_dir}', '--batch_size=64')
  run_main(
    evaluate,
    *common,
    '--split=test',
    '--save_predictions',
    f'--output_dir={tmp_path}',
    '--covariance_images=0',
  )
  expected = rows_lib.read(str(tmp_path / 'predictions/het_xl.npz'), 'log_prob')

  config = data.DatasetConfig('digits', {'image': 8, 'label': 1}, 'test', 359, shuffle=False)
  levels = (next(data.get_dataset(config))['image'] + 1) / 2
  np.savez(tmp_path / 'digits.npz', image=levels)
  out = tmp_path / 'out.json'
  printed = run_main(predict, *common, f'--dataset={tmp_path}/digits.npz', f'--json={out}')
  assert '359 images, the first 20' in printed
  rows = json.loads(out.read_text())
  np.testing.assert_allclose(
    [row['top'][0]['probability'] for row in rows], np.exp(expected.log_prob.max(1)), rtol=1e-4
  )
  p = np.exp(expected.log_prob.astype(float))
  entropy = -(p * np.log(p)).sum(1)
  np.testing.assert_allclose([row['entropy'] for row in rows], entropy, rtol=1e-4)
  assert {len(row['top']) for row in rows} == {5} and rows[0]['top'][0]['name'] in '0123456789'

  saved = tmp_path / 'predictions/het_xl.npz'
  run_main(predict, f'--checkpoint={saved}', f'--json={out}')
  for ours, theirs in zip(json.loads(out.read_text()), rows, strict=True):
    assert [x['name'] for x in ours['top']] == [x['name'] for x in theirs['top']]

  folder = tmp_path / 'photos' / 'deep'
  folder.mkdir(parents=True)
  for i in range(3):
    Image.fromarray(np.rint(levels[i, ..., 0] * 255).astype(np.uint8)).save(folder / f'{i}.png')
  (folder / 'x.png').write_bytes(b'no image')
  (folder / 'notes.txt').write_text('no image')
  os.rename(folder / '2.png', os.fsencode(folder) + b'/2\xff.png')  # no text in UTF-8
  table = tmp_path / 'new' / 'out.csv'
  run_main(predict, *common, f'--dataset={tmp_path}/photos', '--top=2', f'--csv={table}')
  with table.open() as file:
    read = list(csv.DictReader(file))
  assert [row['image'] for row in read] == [str(folder / f'{i}.png') for i in (0, 1, r'2\xff')]
  for row, want in zip(read, rows, strict=False):
    # The PNG has rounded levels and the model is nearly untrained, so classes may change places.
    assert float(row['probability_1']) == pytest.approx(want['top'][0]['probability'], abs=0.01)
    assert row['class_1'] != row['class_2'] and {row['class_1'], row['class_2']} <= {*'0123456789'}


def test_an_array_keeps_its_bytes(tmp_path):
  image = np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8)
  np.savez(tmp_path / 'x.npz', image=image)
  read, labels = Images(f'{tmp_path}/x.npz').read('all', np.array([2, 0]), 8, 0)
  assert read.dtype == np.uint8  # not four times as much memory
  np.testing.assert_array_equal(read[..., 0], image[[2, 0]])
  assert (labels == -1).all()


@pytest.mark.parametrize('shape', [(28, 28, 3), (28, 28, 1), (5, 0, 8), (28, 28)])
def test_an_array_of_one_image_is_not_taken_for_several(tmp_path, shape):
  np.savez(tmp_path / 'x.npz', image=np.zeros(shape, np.uint8))
  with pytest.raises(ValueError, match=r'\[N, H, W'):
    Images(f'{tmp_path}/x.npz')


def test_a_table_is_replaced_as_a_whole(tmp_path):
  path = tmp_path / 'new' / 'out.csv'
  row = {'image': 'a.png', 'entropy': 0.5, 'top': [{'name': 'cat', 'probability': 0.8}]}
  write_csv([row], str(path))
  whole = path.read_bytes()
  with pytest.raises(KeyError):
    write_csv([row, {}], str(path))
  assert path.read_bytes() == whole and [*path.parent.iterdir()] == [path]


@pytest.mark.slow
def test_photographs_are_cropped_alike_on_a_machine_without_the_training_data(digits_run, tmp_path):
  rng = np.random.default_rng(0)
  for i in range(10):
    path = tmp_path / 'photos' / f'class {i}' / f'{i}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 255, (80, 160), np.uint8)).convert('RGB').save(path)
  run = runs.open_run(digits_run[0])
  found = []
  for task in (f'{tmp_path}/photos', '/nowhere/photos'):
    run = dataclasses.replace(run, task=task)
    found.append(predict_images(run, f'{tmp_path}/photos/class 3', batch_size=64))
  assert found[0] == found[1]


@pytest.mark.slow
def test_wrong_settings(digits_run, run_main, tmp_path):
  (tmp_path / 'broken.npz').write_bytes(b'PK')
  np.savez(tmp_path / 'levels.npz', image=np.full((2, 8, 8), 255.0))
  np.savez(tmp_path / 'other.npz', features=np.zeros((2, 3)))
  np.savez(tmp_path / 'first.npz', image=np.zeros((2, 3, 8, 8)))
  cases = {
    '--top=3': '--dataset is needed',
    'flat': 'unknown arguments flat: flags begin with --',
    f'--dataset={tmp_path}/other.npz': 'other.npz is not a valid NPZ file: it lacks the arrays',
    f'--dataset={tmp_path}/none': 'none: there is no such file or folder',
    f'--dataset=image_folder:{tmp_path}': 'holds no images',
    f'--dataset=npz:{tmp_path}/first.npz': 'channels first',
    f'--dataset={tmp_path}/broken.npz': 'broken.npz',
    f'--dataset={tmp_path}/levels.npz': 'must lie in [0, 1], these in [255.0, 255.0]',
  }
  for argument, message in cases.items():
    assert message in run_main(predict, f'--checkpoint={digits_run[0]}', argument, code=2)
  rows = '--checkpoint=vit.npz', '--dataset=photos'
  assert '--checkpoint=vit.npz' in run_main(predict, *rows, code=2)
  for unused in ('--batch_size=8', '--gin.HEAD=None'):
    message = run_main(predict, '--checkpoint=rows.npz', unused, code=2)
    assert 'has no effect on --checkpoint=rows.npz, a file of predictions' in message
