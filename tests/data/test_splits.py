import pytest

from het_plugin.data.splits import SliceableSplits, SplitPart, resolve

SPLITS = {'train': 1438, 'test': 359, 'stream': None, 'odd[name]': 3}
SIZES = [1, 3, 101, 50000]
PERCENTS = ['0', '1', '12.5', '50', '66.6', '99.5', '100', '-1', '-33']
RECORDS = ['0', '3', '36', '1_000', '-1', '-30']


def slices(boundaries):
  bounds = ['', *boundaries]
  return [f'train[{a}:{b}]' for a in bounds for b in bounds if a or b]


def test_boundaries_are_those_of_tfds():
  tfds = pytest.importorskip('tensorflow_datasets')
  compared = 0
  for size in SIZES:
    infos = {'train': tfds.core.SplitInfo(name='train', shard_lengths=[size], num_bytes=0)}
    for split in slices([f'{p}%' for p in PERCENTS]) + slices(RECORDS):
      try:
        (theirs,) = tfds.core.ReadInstruction.from_spec(split).to_absolute(infos)
      except ValueError:  # out of range
        with pytest.raises(ValueError, match='must lie in'):
          resolve(split, {'train': size})
        continue
      start, stop = theirs.from_ or 0, size if theirs.to is None else theirs.to
      if start >= stop:
        with pytest.raises(ValueError, match='is empty'):
          resolve(split, {'train': size})
        continue
      assert resolve(split, {'train': size}) == SplitPart('train', start, stop - start), (
        split,
        size,
      )
      compared += 1
  assert compared > 130


def test_whole_splits():
  assert resolve('train', SPLITS) == SplitPart('train', 0, 1438)
  assert resolve('stream', SPLITS) == SplitPart('stream', 0, None)
  assert resolve('odd[name]', SPLITS) == SplitPart('odd[name]', 0, 3)


SYNTAX = "a slice is of one split, in records ('train[:2000]', 'train[-500:]') or in percent"


@pytest.mark.parametrize(
  'split,message',
  [
    ('dev[:5]', "split is 'dev[:5]'; the splits of digits are"),
    ('train[10%:200]', SYNTAX),
    ('stream[:10]', "the split 'stream' of digits is endless, which has no slices"),
    ('train[:2000]', 'boundaries must lie in [-1438, 1438]'),
    ('train[7:7]', "split is 'train[7:7]', which is empty"),
  ],
)
def test_errors_are_one_sentence(split, message):
  with pytest.raises(ValueError) as error:
    resolve(split, SPLITS, 'digits')
  assert message in str(error.value)


def test_a_mapping_for_seqio():
  splits = SliceableSplits(SPLITS)
  assert list(splits) == list(SPLITS) and len(splits) == 4
  assert 'train' in splits and 'train[10%:]' in splits
  assert 'dev' not in splits and 'stream[:5]' not in splits
  assert splits['train[-500:]'] == 500 and splits['stream'] is None
