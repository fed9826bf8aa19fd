import pytest

from het_plugin.data.splits import SplitPart, resolve

SPLITS = {'train': 1438, 'test': 359, 'stream': None, 'odd[name]': 3}


@pytest.mark.parametrize(
  'bounds, start, stop',
  [(':2', 0, 2), ('-5:', 1433, 1438), ('1_000:-3', 1000, 1435), ('12.5%:50%', 180, 719)],
)
def test_slices(bounds, start, stop):
  assert resolve(f'train[{bounds}]', SPLITS) == SplitPart('train', start, stop - start)


def test_whole_splits():
  assert resolve('train', SPLITS) == SplitPart('train', 0, 1438)
  assert resolve('stream', SPLITS) == SplitPart('stream', 0, None)
  assert resolve('odd[name]', SPLITS) == SplitPart('odd[name]', 0, 3)


SYNTAX = "'train' of digits has 1438 records: "


@pytest.mark.parametrize(
  'split,message',
  [
    ('dev[:5]', "split='dev[:5]' "),
    ('train[10%:200]', SYNTAX),
    ('stream[:10]', "'stream' of digits is endless"),
    ('train[:2000]', SYNTAX),
    ('train[:5]+train[9:]', SYNTAX),
    ('train[:1shard]', 'slices by shard are not supported'),
    ('train[7:7]', "split is 'train[7:7]', which is empty"),
  ],
)
def test_errors_are_one_sentence(split, message):
  with pytest.raises(ValueError) as error:
    resolve(split, SPLITS, 'digits')
  assert message in str(error.value)
