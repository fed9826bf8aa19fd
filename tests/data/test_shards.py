"""Parquet files and tar shards: which columns and members, splits, labels, captions and damage."""

import base64
import gzip
import io
import json
import pickle
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from het_plugin.data import preprocess, shards, tasks

NAMES = ('wren', 'robin', 'owl')


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def encoded(level, format='PNG'):
  file = io.BytesIO()
  Image.fromarray(np.full((9, 8, 3), level, np.uint8)).save(file, format, lossless=True)
  return file.getvalue()


def image_struct(levels):
  return pa.array([{'bytes': encoded(level), 'path': f'{level}.png'} for level in levels])


def write_parquet(path, columns, feature=None, row_group_size=2):
  path.parent.mkdir(parents=True, exist_ok=True)
  table = pa.table(columns)
  if feature is not None:
    info = {'info': {'features': feature}}
    table = table.replace_schema_metadata({'huggingface': json.dumps(info)})
  pq.write_table(table, path, row_group_size=row_group_size)


def hub(tmp_path, num_rows=5):
  """A data set with the names and the metadata of the hub: 2 x num_rows to train, 3 to test."""
  feature = {'label': {'names': NAMES, '_type': 'ClassLabel'}}
  levels = range(2 * num_rows)
  for i in range(2):
    of_file = levels[i * num_rows : (i + 1) * num_rows]
    columns = {'image': image_struct(of_file), 'label': [level % 3 for level in of_file]}
    write_parquet(tmp_path / f'hub/data/train-{i:05d}-of-00002.parquet', columns, feature)
  columns = {'image': image_struct([50, 51, 52]), 'label': [2, 1, 0]}
  write_parquet(tmp_path / 'hub/data/test-00000-of-00001.parquet', columns, feature)
  return tmp_path / 'hub'


def write_tar(path, samples):
  path.parent.mkdir(parents=True, exist_ok=True)
  with tarfile.open(path, 'w') as tar:
    add_members(tar, samples)


def add_members(tar, samples):
  for name, content in samples:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def samples_of(levels):
  for level in levels:
    yield f'./sub/{level:03d}.png', encoded(level)
    yield f'./sub/{level:03d}.cls', str(level % 3).encode()
    yield f'./sub/{level:03d}.txt', f'a {NAMES[level % 3]}'.encode()
    yield f'./sub/{level:03d}.json', json.dumps({'meta': {'of': [level % 3, 2]}}).encode()


def read(task, split, ids):
  """Levels of the images, None for one that is unreadable, and the labels or captions."""
  images, labels = tasks.get_task(task).examples.read(split, np.array(ids), 8, 0)
  decoded = [None if x is None else preprocess.decode(x) for x in images]
  return [None if x is None else int(x[0, 0, 0]) for x in decoded], labels


def test_the_hubs_layout_is_read_in_any_order(tmp_path):
  task = f'parquet:{hub(tmp_path)}'
  info = tasks.get_task(task).info
  assert info.class_names == NAMES and info.splits == {'test': 3, 'train': 10}
  levels, labels = read(task, 'train', [9, 0, 4, 5, 0])
  assert levels == [9, 0, 4, 5, 0] and labels.ravel().tolist() == [0, 0, 1, 2, 0]
  assert read(task, 'test', [1])[0] == [51]
  assert (
    tasks.get_task(task).examples.describe('train', 7).endswith('train-00001-of-00002.parquet[2]')
  )
  of_pattern = tasks.get_task(f'{task}/data/train-*.parquet').info
  assert sum(of_pattern.splits.values()) == 10 and set(of_pattern.splits) == {'train', 'validation'}


@pytest.mark.parametrize(
  ('labels', 'expected', 'names'),
  [
    (pa.array([2, 0], pa.int8()), [[2], [0]], None),
    (pa.array(['b', 'a']), [[1], [0]], ('a', 'b')),
    (pa.array(['b', 'a']).dictionary_encode(), [[1], [0]], ('a', 'b')),
    (pa.array([[0, 2], [1]]), [[0, 2], [1, -1]], None),
    (pa.array([['b'], ['a', 'c']]), [[1, -1], [0, 2]], ('a', 'b', 'c')),
    (pa.array([2, 0], pa.uint64()), [[2], [0]], None),
    (pa.array([True, False]), [[1], [0]], None),
    (pa.array([2.0, 0.0]), [[2], [0]], None),
    (pa.array([7, 1]).dictionary_encode(), [[7], [1]], None),
    (pa.array(['b', 'a'], pa.large_string()).dictionary_encode(), [[1], [0]], ('a', 'b')),
    (pa.array([['b'], ['a']], pa.list_(pa.string(), 1)), [[1], [0]], ('a', 'b')),
    (pa.array([[0, None, 2], [1]], pa.large_list(pa.uint8())), [[0, -1, 2], [1, -1, -1]], None),
    (pa.chunked_array([pa.array([[9], [0, 2]]).slice(1), [[]]]), [[0, 2], [-1, -1]], None),
  ],
)
def test_labels_of_a_column(tmp_path, labels, expected, names):
  write_parquet(tmp_path / 'a.parquet', {'img': [encoded(1), encoded(2)], 'cls': labels})
  task = f'parquet:{tmp_path}/a.parquet'
  assert tasks.get_task(task).info.class_names == names
  assert sorted(tasks.get_task(task).info.splits) in (['train'], ['train', 'validation'])
  source = tasks.get_task(task).examples
  assert np.array_equal(source._labels, expected)


@pytest.mark.parametrize(
  'labels',
  [
    pa.array([None, 2, -1], pa.int16()),
    pa.array([None, 2, None], pa.uint8()),
    pa.array([float('nan'), 2.0, None]),
    pa.array([None, 'c', '']),
    pa.array([None, [2], []]),
    pa.array([None, [0.0, 0.0, 1.0], []]),
  ],
)
def test_rows_without_a_label_are_masked(tmp_path, labels):
  columns = {'image': [encoded(1), encoded(2), encoded(3)], 'label': labels}
  write_parquet(tmp_path / 'test.parquet', columns)
  levels, found = read(f'parquet:{tmp_path}', 'test', [0, 1, 2])
  assert levels == [None, 2, None]
  found = found['label'] if found.dtype.names else found
  assert found[1].tolist() == [0 if pa.types.is_string(labels.type) else 2]


def test_files_of_one_data_set_may_differ_in_types(tmp_path):
  write_parquet(tmp_path / 'test-0.parquet', {'image': pa.nulls(0), 'label': pa.nulls(0)})
  write_parquet(tmp_path / 'test-1.parquet', {'image': image_struct([4]), 'label': pa.array([1])})
  images = pa.array([encoded(5)], pa.large_binary())
  columns = {'label': pa.array([2], pa.uint8()), 'image': images}
  write_parquet(tmp_path / 'test-2.parquet', columns)
  levels, labels = read(f'parquet:{tmp_path}', 'test', [1, 0])
  assert levels == [5, 4] and labels.ravel().tolist() == [2, 1]


def test_columns_and_files_with_dots_in_their_names(tmp_path):
  columns = {'im.a': image_struct([4, 5]), 'im': [encoded(9)] * 2, 'y.fine': [1, 0], 'y': [0, 0]}
  write_parquet(tmp_path / '.test.parquet', columns)
  task = f'parquet:{tmp_path}/.test.parquet?image=im.a&label=y.fine'
  levels, labels = read(task, 'test', [1, 0])
  assert levels == [5, 4] and labels.ravel().tolist() == [0, 1]


def test_copies_of_a_source_read_the_same(tmp_path):
  write_tar(tmp_path / 'test.tar', samples_of([0, 1, 2]))
  for prefix in ('parquet', 'parquet_captions', 'webdataset', 'webdataset_captions'):
    path = tmp_path / 'test.tar'
    if prefix.startswith('parquet'):
      path = tmp_path / 'test.parquet'
      columns = {'image': image_struct([0, 1, 2]), 'label': [0, 1, 2], 'text': ['a', 'b', 'c']}
      write_parquet(path, columns)
    source = tasks.get_task(f'{prefix}:{path}').examples
    ids = np.array([2, 0])
    expected = source.read('test', ids, 8, 0)
    images, labels = pickle.loads(pickle.dumps(source)).read('test', ids, 8, 0)
    assert images == expected[0] and np.array_equal(labels, expected[1])


def test_soft_labels_votes_and_weights(tmp_path):
  images = [encoded(1), encoded(2)]
  soft = pa.array([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]])
  write_parquet(tmp_path / 'soft.parquet', {'image': images, 'label': soft})
  source = tasks.get_task(f'parquet:{tmp_path}/soft.parquet').examples
  assert source.info.num_classes == 3
  assert source._labels['label'].tolist() == [[1, 0], [0, -1]]
  assert source._labels['label_weight'][0].tolist() == [0.75, 0.25]
  columns = {
    'image': images,
    'label': pa.array([[0, 1], [1]]),
    'annotator': pa.array([['eva', 'ben'], ['ben']]),
    'weight': [1.0, 2.0],
  }
  write_parquet(tmp_path / 'votes.parquet', columns)
  source = tasks.get_task(f'parquet:{tmp_path}/votes.parquet').examples
  assert source.info.annotators == ('ben', 'eva') and source._labels['weight'].tolist() == [1, 2]
  assert source._labels['annotator'].tolist() == [[1, 0], [0, -1]]


def test_captions_and_base64(tmp_path):
  text = [base64.b64encode(encoded(7)).decode(), 'data:image/png;base64,no']
  columns = {'jpg': text, 'caption': [['one', None], ['two', '']]}
  write_parquet(tmp_path / 'test.parquet', columns)
  task = f'parquet_captions:{tmp_path}/test.parquet?image=jpg'
  assert read(task, 'test', [0, 1]) == ([7, None], [['one'], ['two']])


def test_an_unlabelled_split_is_left_out(tmp_path, caplog):
  root = hub(tmp_path)
  columns = {'image': image_struct([1]), 'label': [-1]}
  write_parquet(root / 'data/test-00000-of-00001.parquet', columns)
  assert tasks.get_task(f'parquet:{root}').info.splits == {'train': 10}
  assert 'has no labels' in caplog.text


def test_the_version_tells_other_labels_and_other_files(tmp_path):
  make = tasks._MAKERS['parquet'][0]
  before = make(str(hub(tmp_path))).info.version
  assert make(str(hub(tmp_path))).info.version == before
  assert make(str(hub(tmp_path, num_rows=6))).info.version != before


def test_a_damaged_row_group_is_masked(tmp_path):
  root = hub(tmp_path)
  path = root / 'data/train-00000-of-00002.parquet'
  chunk = pq.read_metadata(path).row_group(1).column(0)
  content = bytearray(path.read_bytes())
  start = chunk.dictionary_page_offset or chunk.data_page_offset
  content[start : start + chunk.total_compressed_size] = b'\xff' * chunk.total_compressed_size
  path.write_bytes(content)
  levels, labels = read(f'parquet:{root}', 'train', [1, 2, 3, 4])
  assert levels == [1, None, None, 4] and len(labels) == 4


@pytest.mark.parametrize('field', ['cls', 'json.meta.of'])
def test_shards_are_read_in_any_order(tmp_path, field):
  write_tar(tmp_path / 'w/birds-train-000000.tar', samples_of(range(4)))
  write_tar(tmp_path / 'w/birds-train-000001.tar', samples_of(range(4, 6)))
  write_tar(tmp_path / 'w/birds-val-000000.tar', samples_of([30, 31]))
  (tmp_path / 'w/classnames.txt').write_text('\n'.join(NAMES))
  task = f'webdataset:{tmp_path}/w?label={field}'
  for _ in range(2):  # by an index that is made, and one that was kept
    tasks._made.cache_clear()
    info = tasks.get_task(task).info
    assert info.splits == {'train': 6, 'validation': 2} and info.class_names == NAMES
    levels, labels = read(task, 'train', [5, 0, 4, 0])
    assert levels == [5, 0, 4, 0] and labels[:, 0].tolist() == [2, 0, 1, 0]
    assert read(task, 'validation', [1])[0] == [31]
  assert labels.shape[1] == (1 if field == 'cls' else 2)
  captions = f'webdataset_captions:{tmp_path}/w/birds-train-{{000000..000001}}.tar'
  info = tasks.get_task(captions).info
  assert sum(info.splits.values()) == 6
  assert read(captions, 'train', [0])[1] == [['a wren']]


def test_names_in_cls_and_a_sample_without_an_image(tmp_path):
  samples = [('a.cls', b'owl'), ('a.webp', encoded(5, 'WEBP')), ('b.cls', b'wren'), ('c.png', b'')]
  write_tar(tmp_path / 'test.tar', samples)
  task = f'webdataset:{tmp_path}/test.tar'
  assert tasks.get_task(task).info.class_names == ('owl', 'wren')
  levels, labels = read(task, 'test', [0, 1, 2])
  assert levels == [5, None, None] and labels.ravel().tolist()[:2] == [0, 1]


def _two_labelled():
  return [('a.png', encoded(1)), ('a.cls', b'0'), ('b.png', encoded(2)), ('b.cls', b'1')]


def _headers(format):
  """Names beyond 100 bytes, which are in a header of their own, and one that is absolute."""

  def write(path):
    long = f'd.1/{"x" * 150}é/a'
    with tarfile.open(path, 'w', format=format) as tar:
      samples = [(f'{long}.PNG', encoded(1)), (f'{long}.Cls', b'0'), ('/b.png', encoded(2))]
      add_members(tar, [*samples, ('/b.cls', b' 1\n'), ('.c.png', encoded(3)), ('__d.cls', b'0')])

  return write


def _extra(kind, **fields):
  """Two samples, and between them a member of another kind than a file."""

  def write(path):
    first, rest = _two_labelled()[:2], _two_labelled()[2:]
    with tarfile.open(path, 'w') as tar:
      add_members(tar, first)
      member = tarfile.TarInfo('c.png')
      member.type = kind
      for name, value in fields.items():
        setattr(member, name, value)
      tar.addfile(member, io.BytesIO(b'\0' * member.size))
      add_members(tar, [('c.cls', b'0'), *rest])

  return write


@pytest.mark.parametrize(
  ('write', 'expected'),
  [
    (_headers(tarfile.PAX_FORMAT), [1, 2, None]),
    (_headers(tarfile.GNU_FORMAT), [1, 2, None]),
    (_extra(tarfile.SYMTYPE, linkname='a.png'), [1, None, 2]),
    (_extra(tarfile.LNKTYPE, linkname='a.png'), [1, None, 2]),
    (_extra(tarfile.FIFOTYPE), [1, None, 2]),
    (_extra(tarfile.GNUTYPE_SPARSE, size=512), [1, None, 2]),
  ],
)
def test_members_of_every_kind(tmp_path, write, expected):
  write(tmp_path / 'test.tar')
  source = tasks.get_task(f'webdataset:{tmp_path}/test.tar').examples
  num_rows = source.info.splits['test']
  levels, labels = read(f'webdataset:{tmp_path}/test.tar', 'test', np.arange(num_rows))
  assert levels[: len(expected)] == expected
  assert [int(x) for x, y in zip(labels[:, 0], levels, strict=True) if y is not None] == [0, 1]


def test_a_shard_that_changed_is_not_read(tmp_path):
  path = tmp_path / 'test.tar'
  write_tar(path, samples_of([1, 2]))
  source = tasks.get_task(f'webdataset:{path}').examples
  write_tar(path, samples_of([3]))
  with pytest.raises(ValueError, match='changed since the start'):
    source.read('test', np.array([0]), 8, 0)


def _parquet(tmp_path):
  columns = {'a': [encoded(1)], 'b': [encoded(2)], 'label': [0], 'fine': [1]}
  write_parquet(tmp_path / 'x.parquet', columns)
  return f'parquet:{tmp_path}'


def _other_columns(tmp_path):
  _parquet(tmp_path)
  write_parquet(tmp_path / 'y.parquet', {'image': [encoded(1)], 'label': [0]})
  return f'parquet:{tmp_path}'


def _soft_of_two_lengths(tmp_path):
  columns = {'image': [encoded(1)] * 2, 'label': pa.array([[0.5, 0.5], [1.0]])}
  write_parquet(tmp_path / 'x.parquet', columns)
  return f'parquet:{tmp_path}'


def _no_parquet(tmp_path):
  (tmp_path / 'x.parquet').write_bytes(b'PAR1')
  return f'parquet:{tmp_path}/x.parquet'


def _twice(tmp_path):
  write_tar(tmp_path / 'x.tar', [*samples_of([1]), *samples_of([1])])
  return f'webdataset:{tmp_path}'


def _altered(alter):
  """A tar of two samples whose bytes were altered; a header or a small member is a block of 512."""

  def make(tmp_path):
    write_tar(tmp_path / 'x.tar', _two_labelled())
    path = tmp_path / 'x.tar'
    path.write_bytes(alter(path.read_bytes()))
    return f'webdataset:{tmp_path}'

  return make


def _label(content):
  def make(tmp_path):
    samples = [('a.png', b'1'), ('a.cls', content), ('b.png', b'1'), ('b.cls', b'1')]
    write_tar(tmp_path / 'x.tar', samples)
    return f'webdataset:{tmp_path}'

  return make


def _two_images(tmp_path):
  write_tar(tmp_path / 'x.tar', [('a.png', b'1'), ('a.jpg', b'1'), ('a.cls', b'1')])
  return f'webdataset:{tmp_path}'


def _no_labels(tmp_path):
  write_tar(tmp_path / 'x.tar', [('a.png', b'1')])
  return f'webdataset:{tmp_path}'


@pytest.mark.parametrize(
  ('make', 'setting', 'message'),
  [
    (_parquet, '', r'unclear which column is the image; add \?image=COLUMN .* a \(binary\), b'),
    (_parquet, '?image=c', "there is no column 'c'; the columns are a"),
    (_parquet, '?picture=a', "'picture=a' must be USE=COLUMN, with a use out of image, label"),
    (_other_columns, '', 'has other columns than'),
    (_soft_of_two_lengths, '', 'lists of 1 to 2 numbers; soft labels need K'),
    (_no_parquet, '', 'is not a whole Parquet file'),
    (lambda tmp_path: f'parquet:{tmp_path}', '', r'no file there ends in \.parquet'),
    (_twice, '', 'sub/001.png is there twice'),
    (_altered(lambda x: x[: 5 * 512 + 9]), '', 'ends within b.png: it was not copied to its end'),
    (_altered(lambda x: x[: 6 * 512]), '', 'ends after b.png, without the end of a tar'),
    (_altered(lambda x: x + x), '', 'what follows b.cls cannot be read; make the file again'),
    (_altered(lambda x: x[:2048] + b'x' * 512 + x[2560:]), '', 'what follows a.cls cannot be read'),
    (_altered(gzip.compress), '', 'is not a whole tar file without compression'),
    (_altered(lambda x: b''), '', 'is not a whole tar file without compression: empty file'),
    (_label(b'-2'), '', 'there is the label -2; class numbers are 0'),
    (_label(b'owl'), '', "the label 'owl' is no number, and 1 is one"),
    (_label(b'x' * 5000), '', 'the label has 5000 characters; it must be a number, a name'),
    (_two_images, '', r'has the images jpg, png; add \?image=FIELD'),
    (_no_labels, '', r'no sample has a label in the field cls; add \?label=FIELD'),
    (_no_labels, '?names=none.txt', 'there is no file .*none.txt'),
  ],
)
def test_errors_name_what_is_wrong(tmp_path, make, setting, message):
  task = make(tmp_path) + setting
  with pytest.raises(ValueError, match=message):
    tasks.get_task(task)


@pytest.mark.parametrize(
  ('name', 'split'),
  [
    ('train-00000-of-00042.parquet', 'train'),
    ('dev-00000-of-00001-abc.parquet', 'validation'),
    ('unlabeled-00000-of-00001.parquet', 'unlabeled'),
    ('test/0000.parquet', 'test'),
    ('imagenet-val-000001.tar', 'validation'),
    ('0000.parquet', 'train'),
    ('trained.parquet', 'train'),
    ('latest.tar', 'train'),
  ],
)
def test_splits_of_names(tmp_path, name, split):
  assert shards.split_of(tmp_path / name, tmp_path) == split


def test_braces_are_expanded_as_by_a_shell():
  assert list(shards.expand('a{08..10}.tar')) == ['a08.tar', 'a09.tar', 'a10.tar']
  assert list(shards.expand('{x,y}{1..2}')) == ['x1', 'x2', 'y1', 'y2']
