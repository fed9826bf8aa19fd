"""One text names rows: a file, a run, or a task."""

import json

import numpy as np
import pytest

from het_plugin import rows, runs, weights
from het_plugin.commands import audit, evaluate, fewshot, probe, select
from het_plugin.runs import sources
from het_plugin.runs.sources import open_source


def test_a_run_and_a_file_of_its_rows_are_the_same_source(
  digits_run, tmp_path, run_main, monkeypatch
):
  folder = str(digits_run[0])
  found = open_source(f'{folder}:train[:64]').rows()
  assert isinstance(found.features, np.memmap)  # those of many runs need not fit in memory
  file = tmp_path / 'train.npz'
  rows.write(file, found)
  read = open_source(str(file)).rows()
  np.testing.assert_array_equal(read.features, found.features)
  assert (read.meaning, len(read)) == (found.meaning, 64)
  run = runs.open_run(folder)
  np.testing.assert_array_equal(run.rows('train[:64]').features, found.features)
  log_prob = open_source(folder).rows('test[:8]', ('log_prob',)).log_prob
  assert log_prob.shape == (8, 10)
  results = []
  for source in (file, f'{folder}:train[:64]'):
    target = tmp_path / 'probe.json'
    run_main(probe, f'--train={source}', '--heads=det', '--folds=2', '--C=0.1', f'--json={target}')
    (row,) = json.loads(target.read_text())
    results.append({name: x for name, x in row.items() if name != 'seconds'})
  assert results[0] == results[1]
  batches = []
  of_batches = runs.Run.rows

  def watched(*args, batch_size, **settings):
    batches.append(batch_size)
    return of_batches(*args, batch_size=batch_size, **settings)

  monkeypatch.setattr(runs.Run, 'rows', watched)
  predictions = f'--predictions={folder}:test[:64]', '--batch_size=32'
  assert '64 examples' in run_main(evaluate, *predictions) and batches == [32]


def test_a_task_is_a_source_of_pixels(run_main):
  found = open_source('digits').rows('train[:20]')
  assert found.features.shape == (20, 64) and np.abs(found.features).max() <= 1
  assert len(open_source('digits:test[:5]').rows()) == 5
  with pytest.raises(ValueError, match='digits is a task, whose images have no log_prob'):
    open_source('digits').rows('test', ('log_prob',))
  shots = ['--shots=1', '--seeds=0']
  assert 'digits' in run_main(fewshot, '--train=digits', '--test=digits', *shots)


def test_a_whole_file_of_several_splits_warns(tmp_path, caplog):
  file = tmp_path / 'a.npz'
  np.savez(file, x=np.ones((2, 3), np.float32), y=[0, 1], split=['train', 'test'])
  assert len(open_source(f'{file}:test').rows()) == 1 and not caplog.messages
  for _ in range(2):
    assert len(open_source(str(file)).rows()) == 2
  assert caplog.messages == [
    f'All rows of {file} are taken, of the splits test, train: {file}:train has those of one.'
  ]


def test_a_folder_of_represent_is_a_source(tmp_path, run_main):
  x = np.eye(6, 3, dtype=np.float16)
  for split, label in {'train': 0, 'validation': 1}.items():
    found = rows.Rows({'features': x}, np.full((6, 1), label), np.arange(6))
    (tmp_path / 'pre_logits').mkdir(exist_ok=True)
    rows.write(tmp_path / f'pre_logits/{split}.safetensors', found)
  folder = str(tmp_path)
  assert open_source(folder).rows('train').label.tolist() == [0] * 6
  assert open_source(folder).rows().label.tolist() == [1] * 6
  assert open_source(f'{folder}:validation').rows('train').label.tolist() == [1] * 6
  assert 'RankMe' in run_main(select, 'knn', f'--train={folder}', '--metric=cosine')
  for useless in ('--batch_size=8', '--gin.a=1'):
    words = run_main(evaluate, f'--predictions={folder}', useless, code=2)
    assert 'has no effect on files of predictions' in words
  assert sources.halves(folder) == tuple(
    f'{folder}/pre_logits/{split}.safetensors' for split in ('train', 'validation')
  )
  assert sources.halves(f'{folder}:validation') == (f'{folder}:validation', None)
  replaced = f'--suggest={folder}/pre_logits/train.safetensors'
  assert 'is read by the audit' in run_main(audit, f'--train={folder}', replaced, code=2)
  with pytest.raises(ValueError, match='named test; it has .*validation.safetensors: name'):
    open_source(f'{folder}:test').rows()
  # A split that is not the one that is asked for is not taken for it.
  (tmp_path / 'pre_logits/validation.safetensors').unlink()
  words = run_main(fewshot, f'--train={folder}', f'--test={folder}', code=2)
  assert 'named test or validation; it has' in words
  (tmp_path / 'pre_logits/train.safetensors').rename(tmp_path / 'cub.safetensors')
  assert len(open_source(folder).rows()) == len(open_source(folder).rows('train')) == 6


@pytest.mark.parametrize(
  ('train', 'test', 'same'),
  [
    ('a.npz', './a.npz', True),
    ('x.npy,y.npy', './x.npy,b/../y.npy', True),
    ('a.npz:train', './a.npz:train', True),
    ('a.npz:train', 'a.npz:test', False),
    ('a.npz', 'b/a.npz', False),
  ],
)
def test_one_file_is_no_pair_however_it_is_spelt(tmp_path, monkeypatch, train, test, same):
  monkeypatch.chdir(tmp_path)
  if not same:
    assert len(sources.different([train, test])) == 2
    return
  with pytest.raises(ValueError, match=f'^--train={train} and --test={test} are one file, '):
    sources.different([train, test])


def test_what_is_no_source(tmp_path):
  path = str(tmp_path / 'vit.npz')
  (tmp_path / 'empty').mkdir()
  weights.write_arrays(path, {'head/kernel': np.ones((2, 3), np.float32)})
  for text, words in {
    path: 'is a published file, which has no rows',
    f'{tmp_path}/absent.npz': 'absent.npz does not exist',
    'digts': 'neither a file of rows',
    str(tmp_path / 'empty'): 'neither a file of rows',
  }.items():
    with pytest.raises(ValueError, match=words):
      open_source(text).rows()
