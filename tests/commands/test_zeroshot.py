"""`python -m het_plugin.zeroshot`: checkpoints and groups of seeds in, tables and JSON out.

Checkpoints are stood in for by a small model, whose seed is the number in the path.
"""

import json
import re

import numpy as np
import pytest
import scipy.stats

import gin
from het_plugin import runs
from het_plugin.commands import zeroshot
from het_plugin.config import gin_state, registry
from het_plugin.evaluation import zeroshot_datasets
from het_plugin.evaluation.zeroshot_datasets import Tokenizer
from tests.evaluation.small_contrastive import Letters, SmallContrastive, opened

FEW = ('--max_examples=128', '--batch_size=64', '--templates=none')
LETTERS = Letters()


class Towers(runs.Configuration):
  """A configuration whose parameters are drawn from the number in the path."""

  def argument(self, name):
    return {'model': SmallContrastive(), 'train_dataset_cfg': 'the run'}[name]

  def open(self):
    path = self.checkpoint.path
    seed = int(re.search(r'\d+', path)[0])
    model, partitioner, specs, params = opened(seed)
    place = {'checkpoint': path, 'step': 9, 'task': 'a task'}
    return runs.Run(model, partitioner, params, specs, image_size=8, channels=1, **place)


def towers_of(checkpoint, gin_files=(), bindings=(), search_paths=('.',), published=None):
  with gin_state.preserved():
    gin.clear_config()
    gin.parse_config_files_and_bindings(gin_files, bindings)
    return Towers(runs.Checkpoint(checkpoint, 9))


def tokenizer_of(dataset_cfg):
  assert dataset_cfg == 'the run'
  return LETTERS


@pytest.fixture
def towers(monkeypatch):
  registry.register_trainer()  # once for all tests, hence before anything is replaced
  monkeypatch.setattr(runs, 'configuration', towers_of)
  monkeypatch.setattr(zeroshot_datasets, 'run_tokenizer', tokenizer_of)


def test_each_vocabulary_is_checked_before_the_first_checkpoint_is_opened(
  towers, run_main, monkeypatch
):
  tokenizers = iter((LETTERS, Tokenizer('bytes', 12)))
  monkeypatch.setattr(zeroshot_datasets, 'run_tokenizer', lambda _: next(tokenizers))
  monkeypatch.delattr(Towers, 'open')
  flags = '--checkpoint=r/1', '--checkpoint=r/2', '--dataset=digits', *FEW
  printed = run_main(zeroshot, *flags, code=2)
  assert re.search("--checkpoint=r/2: .*vocab_size=64 .* 259, .*'bytes'", printed)


@pytest.mark.slow
def test_seeds_in_groups(towers, run_main, tmp_path):
  out = tmp_path / 'out.json'
  printed = run_main(
    zeroshot,
    '--group=DET=d/1,d/2',
    '--group=HET-XL=x/4,x/5',
    '--group=one=y/7',
    '--checkpoint=z/8',
    '--names=alone',
    f'--json={out}',
    *FEW,
    '--dataset=digits,part=digits',
    '--split=test[:128]',
  )
  result = json.loads(out.read_text())
  assert 'top1' not in result
  assert [(row['run'], row['group']) for row in result['rows'][::2]] == [
    ('alone', None),
    *((f'DET/{n}', 'DET') for n in '12'),
    *((f'HET-XL/{n}', 'HET-XL') for n in '45'),
    ('one/7', 'one'),
  ]
  by_group = {}
  for row in result['rows']:
    if row['dataset'] == 'digits':
      by_group.setdefault(row['group'], []).append(row['top5'])
  assert len(set(by_group['DET'] + by_group['HET-XL'])) > 1
  groups = {(g['dataset'], g['metric'], g['group']): g for g in result['groups']}
  assert len(groups) == 2 * 2 * 3
  for name in ('DET', 'HET-XL'):
    group = groups['digits', 'top5', name]
    assert group['mean'] == pytest.approx(np.mean(by_group[name]))
    assert group['stderr'] == pytest.approx(np.std(by_group[name], ddof=1) / np.sqrt(2))
  expected = scipy.stats.ttest_ind(by_group['HET-XL'], by_group['DET'], equal_var=False).pvalue
  assert groups['digits', 'top5', 'HET-XL']['p'] == pytest.approx(expected)
  assert groups['digits', 'top5', 'DET']['p'] is None
  alone = groups['digits', 'top5', 'one']
  assert (alone['stderr'], alone['p'], alone['num_runs']) == (None, None, 1)
  assert "Groups, p of Welch's t-test against DET" in printed
  assert f'±{groups["digits", "top5", "DET"]["stderr"]:.4f}' in printed


def test_classes_that_one_of_several_runs_cannot_tell_apart_are_noted():
  row = {'group': None, 'dataset': 'birds', 'scalars': {'top1': 0.5, 'top5': 1.0}}
  rows = [{**row, 'run': run, 'classes_alike': n} for run, n in (('short', 3), ('long', 0))]
  (note,) = zeroshot.make_report(rows).notes
  assert note.endswith('same tokens as an earlier one (long texts are cut): birds 3.')


@pytest.mark.slow
def test_data_sets_that_gin_files_bind(towers, run_main, tmp_path):
  gin_file = tmp_path / 'sets.gin'
  gin_file.write_text(
    'ZeroShotAction.datasets = (@a/ZeroShotDataset(), @b/ZeroShotDataset())\n'
    "a/ZeroShotDataset:\n  name = 'a'\n  task = 'digits'\n  split = 'test[:50]'\n"
    "b/ZeroShotDataset:\n  name = 'b'\n  task = 'digits'\n  templates = ('{}', 'the {}')\n"
  )
  out = tmp_path / 'out.json'
  common = ('--checkpoint=a/1', f'--gin_file={gin_file}', '--batch_size=64', f'--json={out}')
  run_main(zeroshot, *common)
  rows = json.loads(out.read_text())['rows']
  assert [(row['dataset'], row['num_examples']) for row in rows] == [('a', 50), ('b', 359)]
  assert rows[1]['templates'] == ['{}', 'the {}']
  run_main(zeroshot, *common, '--dataset=b', '--max_examples=30')
  result = json.loads(out.read_text())
  assert result['dataset'] == 'b' and result['num_examples'] == 30
  assert result['templates'] == ['{}', 'the {}']


@pytest.mark.parametrize(
  'flags,message',
  [
    ([], '--checkpoint or --group'),
    (['--group=a'], '--group=a must be NAME=DIR,DIR'),
    (['--group=a=r/1,r/1'], '--group=a=r/1,r/1 '),
    (['--checkpoint=r/1', '--dataset=digits', '--batch_size=6'], 'batch_size=6'),
    (
      ['--checkpoint=r/1', '--dataset=digits', '--identical_captions_right'],
      '--identical_captions_right is for data sets of captions',
    ),
    (['--checkpoint=r/1', '--dataset=glyph_names', '--lower'], '--lower is for data sets of class'),
  ],
)
def test_wrong_flags_are_one_sentence(flags, message, towers, run_main):
  assert message in run_main(zeroshot, *flags, code=2)
