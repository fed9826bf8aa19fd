"""python -m het_plugin.audit, on labels that are wrong in three cases of ten."""

import csv
import json

import numpy as np
import pytest

from het_plugin import audit
from het_plugin import rows as rows_lib

FAST = ['--folds=2', '--C=10', '--C_noise=1', '--num_factors=1', '--max_iter=40']


@pytest.fixture(scope='module')
def noisy(tmp_path_factory):
  """A file of rows whose truth is linear in the features, and the truth."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(900, 6)).astype(np.float32)
  truth = x[:, :3].argmax(axis=1)
  label = np.where(rng.random(900) < 0.3, (truth + 1) % 3, truth)
  path = tmp_path_factory.mktemp('audit') / 'train.npz'
  index = np.arange(900) + 7
  names = ('cat', 'dog', 'owl')
  rows = rows_lib.Rows({'features': x}, np.int32(label)[:, None], index, class_names=names)
  rows_lib.write(path, rows)
  return path, truth, label


def test_wrong_labels_are_listed_first_and_corrected_in_a_copy(noisy, run_main, tmp_path):
  path, truth, label = noisy
  files = {name: tmp_path / f'a.{name}' for name in ('csv', 'json', 'html')}
  fixed = tmp_path / 'fixed.npz'
  said = run_main(
    *(audit, f'--train={path}', f'--suggest={fixed}', *FAST),
    *(f'--{name}={file}' for name, file in files.items()),
  )
  found = json.loads(files['json'].read_text())
  assert 'are wrong' in said and 'owl' in said
  assert 0.2 < found['share'] < 0.4 and sum(found['counts'].values()) == 900
  rows = found['rows']
  assert [list(row) for row in rows[:1]] == [
    ['index', 'label', 'probability', 'wrong', 'suggested', 'kind']
  ]
  order = np.array([row['index'] - 7 for row in rows])
  is_wrong = (label != truth)[order]
  assert is_wrong[:150].mean() > 0.85 and is_wrong[-300:].mean() < 0.1
  assert {(pair['truth'], pair['label']) for pair in found['pairs'][:3]} == {(0, 1), (1, 2), (2, 0)}
  with files['csv'].open() as file:
    listed = list(csv.DictReader(file))
  assert [int(row['index']) for row in listed] == [row['index'] for row in rows]
  corrected = rows_lib.read(str(fixed))
  assert (corrected.label == truth).mean() > (label == truth).mean() + 0.15
  np.testing.assert_array_equal(rows_lib.read(str(path)).label, label)  # the source is as it was
  np.testing.assert_array_equal(corrected.features, rows_lib.read(str(path)).features)
  assert 'Labels that people confuse' in files['html'].read_text()


def test_what_is_wrong_is_one_sentence(noisy, run_main, tmp_path):
  path, _, label = noisy
  rare = tmp_path / 'rare.npz'
  labels = np.append(label[:-1], 3)[:, None]
  np.savez(rare, features=np.zeros((900, 2), np.float32), labels=labels, index=np.arange(900))
  for arguments, message in (
    ([], '--train is needed'),
    ([f'--train={path}', f'--suggest={path}'], 'is --train: name another file'),
    ([f'--train={path}', '--head=lda'], '--heads=lda: lda is unknown'),
    ([f'--train={path}', '--head=det', '--C_noise=1'], 'no effect on --head=det'),
    ([f'--train={path}', '--C=-1'], '--C=-1'),
    ([f'--train={path}', '--C_noise=x'], '--C_noise=x must be a number > 0, or auto'),
    ([f'--train={rare}'], 'class 3 has 1 rows: --folds=5 needs'),
    ([f'--train={tmp_path / "none.npz"}'], 'none.npz'),
  ):
    assert message in run_main(audit, *arguments, code=2)
