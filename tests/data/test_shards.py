"""Parquet files and tar shards: which columns and members, splits, labels, captions and damage."""

import base64
import gzip
import http.server
import io
import json
import pickle
import sys
import tarfile
import threading
import time

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python import array_record_module
from PIL import Image

from het_plugin import data
from het_plugin.data import preprocess, record_source, remote, shard_index, shards, tasks

NAMES = ('wren', 'robin', 'owl')


@pytest.fixture(autouse=True)
def cache_and_no_tensorflow(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  for name in ('tensorflow', 'tensorflow_datasets', 'seqio'):
    monkeypatch.setitem(sys.modules, name, None)


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


def add_members(tar, samples, mtime=0):
  for name, content in samples:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mtime = mtime
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
  path = tmp_path / 'labels.parquet'  # with the same footer
  versions = set()
  for labels in ([0, 1, 0, 1], [1, 0, 1, 0]):
    write_parquet(path, {'image': image_struct([50, 51, 52, 53]), 'label': labels})
    versions.add(make(str(path)).info.version)
  assert len(versions) == 2


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


def _times(path):
  """A time with a fraction, as webdataset writes it, is in a header of its own."""
  with tarfile.open(path, 'w') as tar:
    add_members(tar, _two_labelled(), mtime=1.5)


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
    (_times, [1, 2]),
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


def _other_order_of_names(tmp_path):
  for file, names in (('train', NAMES), ('test', NAMES[::-1])):
    feature = {'label': {'names': names, '_type': 'ClassLabel'}}
    write_parquet(tmp_path / f'{file}.parquet', {'image': [encoded(1)], 'label': [0]}, feature)
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
    (_other_order_of_names, '', 'have other names for the classes of label, or another order'),
    (_soft_of_two_lengths, '', 'lists of 1 to 2 numbers; soft labels need K'),
    (_no_parquet, '', 'is not a whole Parquet file'),
    (lambda tmp_path: f'parquet:{tmp_path}', '', r'no file there is named \*\.parquet'),
    (_twice, '', 'sub/001.png is there twice'),
    (_altered(lambda x: x[: 5 * 512 + 9]), '', 'ends within b.png: it was not copied to its end'),
    (_altered(lambda x: x[: 6 * 512]), '', 'ends after b.png, without the end of a tar'),
    (_altered(lambda x: x + x), '', 'what follows b.cls cannot be read; make the file again'),
    (_altered(lambda x: x[:2048] + b'x' * 512 + x[2560:]), '', 'what follows a.cls cannot be read'),
    (_altered(lambda x: x[:2196] + b'8' + x[2197:]), '', 'what follows a.cls cannot be read'),
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
  assert shards.split_of(name) == split


def test_braces_are_expanded_as_by_a_shell():
  assert list(shards.expand('a{08..10}.tar')) == ['a08.tar', 'a09.tar', 'a10.tar']
  assert list(shards.expand('{x,y}{1..2}')) == ['x1', 'x2', 'y1', 'y2']


def message(number, content):
  """A field of a protocol buffer: bytes, or a whole number."""
  if isinstance(content, int):
    return varint(number << 3) + varint(content % 2**64)
  return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value):
  head = b''
  while value > 127:
    head += bytes([value & 127 | 128])
    value >>= 7
  return head + bytes([value])


def example(**features):
  """A TF Example: fields of bytes, texts, whole numbers, or floats, which are not read."""
  entries = b''
  for name, values in features.items():
    values = values if isinstance(values, list) else [values]
    if isinstance(values[0], int):
      feature = message(3, message(1, b''.join(varint(x % 2**64) for x in values)))
    elif isinstance(values[0], float):
      feature = message(2, message(1, np.array(values, '<f4').tobytes()))
    else:
      texts = [x.encode() if isinstance(x, str) else x for x in values]
      feature = message(1, b''.join(message(1, x) for x in texts))
    entries += message(1, message(1, name.encode()) + message(2, feature))
  return message(1, entries)


def write_tfrecord(path, examples):
  path.parent.mkdir(parents=True, exist_ok=True)
  content = b''
  for record in examples:
    length = len(record).to_bytes(8, 'little')
    content += length + record_source.masked_crc(length).to_bytes(4, 'little') + record + b'0000'
  path.write_bytes(content)


def write_array_record(path, examples):
  path.parent.mkdir(parents=True, exist_ok=True)
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for record in examples:
    writer.write(record)
  writer.close()


def imagenet(levels):
  for level in levels:
    fields = {'image/encoded': encoded(level), 'image/class/label': level % 3, 'image/height': 9}
    yield example(**fields, **{'image/class/text': NAMES[level % 3], 'image/object/bbox': 0.5})


@pytest.mark.parametrize(
  ('prefix', 'write'), [('tfrecord', write_tfrecord), ('array_record', write_array_record)]
)
def test_records_of_examples(tmp_path, prefix, write):
  suffix = '' if prefix == 'tfrecord' else '.array_record'
  write(tmp_path / f'a/train{suffix}-00000-of-00002', imagenet([0, 1]))
  write(tmp_path / f'a/train{suffix}-00001-of-00002', imagenet([2, 3]))
  write(tmp_path / f'a/validation{suffix}-00000-of-00001', [*imagenet([7]), b'no example'])
  task = f'{prefix}:{tmp_path}/a'
  assert tasks.get_task(task).info.splits == {'train': 4, 'validation': 2}
  levels, labels = read(task, 'train', [3, 0, 2, 3])
  assert levels == [3, 0, 2, 3] and labels.ravel().tolist() == [0, 0, 2, 0]
  assert read(task, 'validation', [0, 1])[0] == [7, None]
  by_name = f'{task}?label=image/class/text'
  assert tasks.get_task(by_name).info.class_names == tuple(sorted(NAMES))
  assert read(by_name, 'train', [1])[1].ravel().tolist() == [sorted(NAMES).index(NAMES[1])]
  several = [example(image=encoded(5), labels=[2, 1]), example(image=encoded(6), labels=[0])]
  write(tmp_path / f'b/test{suffix}-00000-of-00001', several)
  levels, labels = read(f'{prefix}:{tmp_path}/b', 'test', [0, 1])
  assert levels == [5, 6] and labels.tolist() == [[2, 1], [0, -1]]


@pytest.mark.parametrize(
  ('alter', 'message'),
  [
    (lambda x: x[:-1], 'ends within record 1: it was not copied to its end'),
    (lambda x: x[:5], 'is damaged, or this is no TFRecord|ends within record 0'),
    (lambda x: b'\xff' + x[1:], 'record 0 is damaged, or this is no TFRecord'),
    (gzip.compress, 'record 0 is damaged, or this is no TFRecord: it is compressed'),
  ],
)
def test_damaged_records(tmp_path, alter, message):
  path = tmp_path / 'a.tfrecord'
  write_tfrecord(path, imagenet([0, 1]))
  path.write_bytes(alter(path.read_bytes()))
  with pytest.raises(ValueError, match=message):
    tasks.get_task(f'tfrecord:{path}')


@pytest.fixture
def server(tmp_path):
  """The address of a folder, behind a server that is slow and fails at times; and its requests."""
  asked = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      asked.append(self.path)
      time.sleep(0.05)
      path = tmp_path / 'far' / self.path[1:]
      if len(asked) % 100 == 7 or (len(asked) % 100 == 9 and path.exists()):
        self.send_error(503)
      elif not path.exists():
        self.send_error(404)
      else:
        content = path.read_bytes()
        first, last = map(int, self.headers['Range'].removeprefix('bytes=').split('-'))
        self.send_response(206)
        self.send_header('Content-Range', f'bytes {first}-{last}/{len(content)}')
        part = content[first : last + 1]
        self.send_header('Content-Length', str(len(part)))
        self.end_headers()
        self.wfile.write(part[: len(part) // 2] if len(asked) % 100 == 11 else part)

    def log_message(self, *args):
      pass

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as of_folder:
    thread = threading.Thread(target=of_folder.serve_forever)
    thread.start()
    yield f'http://127.0.0.1:{of_folder.server_port}', asked
    of_folder.shutdown()
    thread.join()


def far_away(kind, folder):
  """Writes 60 examples in three files, and returns the end of their address."""
  if kind == 'parquet':
    for i in range(3):
      levels = range(20 * i, 20 * i + 20)
      columns = {'image': image_struct(levels), 'label': [level % 3 for level in levels]}
      write_parquet(folder / f'train-{i}.parquet', columns, row_group_size=5)
    return 'train-{0..2}.parquet'
  suffix = 'tar' if kind == 'webdataset' else 'tfrecord'
  for i in range(3):
    levels = range(20 * i, 20 * i + 20)
    if kind == 'webdataset':
      write_tar(folder / f'train-{i}.tar', samples_of(levels))
    else:
      write_tfrecord(folder / f'train-{i}.tfrecord', imagenet(levels))
  return f'train-{{0..2}}.{suffix}'


@pytest.mark.parametrize('kind', ['parquet', 'webdataset', 'tfrecord'])
def test_files_far_away_are_read_as_those_here(tmp_path, server, monkeypatch, kind):
  monkeypatch.setattr(remote, '_FIRST_WAIT', 0.001)
  monkeypatch.setattr(shard_index, '_BLOCK_BYTES', 2**13)
  address, asked = server
  pattern = far_away(kind, tmp_path / 'far')
  here = f'{kind}:{tmp_path}/far/{pattern}'
  there = f'{kind}:{address}/{pattern}'
  assert tasks.get_task(there).info.splits == tasks.get_task(here).info.splits

  def config(name, **settings):
    lengths = {'image': 8, 'label': 1}
    return data.DatasetConfig(name, lengths, 'train', 8, num_epochs=2, **settings)

  def all_labels(config, rows=None, first=0):
    iterator = data.get_dataset(config, rows)
    iterator.set_state({'position': first})
    return [(batch['image'], batch['label'][:, 0], batch['index']) for batch in iterator]

  whole = all_labels(config(there))
  num_far = len(asked)
  expected = all_labels(config(here, order='blocks'))
  for batch, other in zip(whole, expected, strict=True):
    for x, y in zip(batch, other, strict=True):
      np.testing.assert_array_equal(x, y)
  halves = [all_labels(config(there), rows, 16) for rows in (np.arange(4), np.arange(4, 8))]
  for batch, *parts in zip(whole[2:], *halves, strict=True):
    np.testing.assert_array_equal(batch[1], np.concatenate([part[1] for part in parts]))
  assert len(asked) == num_far  # the blocks are on the disk


@pytest.mark.parametrize('kind', ['parquet', 'webdataset', 'tfrecord'])
def test_a_table_corrects_labels(tmp_path, kind):
  task = f'{kind}:{tmp_path}/far/{far_away(kind, tmp_path / "far")}'
  before = tasks.get_task(task)
  named = [before.examples.file('train', i) for i in (0, 7, 40)]
  table = tmp_path / 'labels.csv'
  lines = ['file,label,was', *(f'{name},2,x' for name in named)]
  table.write_text('\n'.join(lines))
  after = tasks.get_task(f'{task}?labels={table}')
  assert after.info.splits == before.info.splits and after.info.version != before.info.version
  ids = np.arange(before.info.splits['train'])
  expected = before.examples.read('train', ids, 8, 0)[1].copy()
  expected[[0, 7, 40]] = 2
  np.testing.assert_array_equal(after.examples.read('train', ids, 8, 0)[1], expected)
  for line, message in (
    (f'{named[0].partition("[")[0]}[99],1', r'line 2: there is no example .*\[99\]'),
    ('x.tar[0],1', 'line 2: there is no example'),
    (f'{named[0]},3', "line 2: '3' is no class"),
    (f'{named[0]},1\n{named[0]},1', 'line 3: .* is there for the second time'),
  ):
    table = table.with_suffix('.again.csv')  # a task is opened once
    table.write_text(f'file,label\n{line}\n')
    with pytest.raises(ValueError, match=message):
      tasks.get_task(f'{task}?labels={table}')
  with pytest.raises(ValueError, match='labels=none.csv: there is no such file'):
    tasks.get_task(f'{task}?labels=none.csv')


def test_a_table_replaces_soft_labels_and_labels_an_image_that_had_none(tmp_path):
  labels = pa.array([[0.5, 0.5], None, [0.25, 0.75]])
  images = [encoded(i) for i in (1, 2, 3)]
  columns = {'image': images, 'label': labels, 'weight': [2.0, 3.0, 4.0]}
  write_parquet(tmp_path / 'test.parquet', columns)
  (tmp_path / 'labels.csv').write_text('file,label\ntest.parquet[1],1\ntest.parquet[2],0\n')
  levels, found = read(f'parquet:{tmp_path}?labels={tmp_path}/labels.csv', 'test', [0, 1, 2])
  assert levels == [1, 2, 3]
  np.testing.assert_array_equal(found['label_weight'], [[0.5, 0.5], [1, 0], [1, 0]])
  np.testing.assert_array_equal(found['label'][1:], [[1, -1], [0, -1]])
  np.testing.assert_array_equal(found['weight'], [2, 3, 4])


def test_a_file_that_is_not_there_and_a_server_that_is_gone(tmp_path, server, monkeypatch):
  monkeypatch.setattr(remote, '_FIRST_WAIT', 0.001)
  with pytest.raises(ValueError, match=r'none\.parquet cannot be read: 404'):
    tasks.get_task(f'parquet:{server[0]}/none.parquet')
  with pytest.raises(
    ValueError, match='a web server lists no files: write their names with braces'
  ):
    tasks.get_task(f'webdataset:{server[0]}/*.tar')
  with pytest.raises(RuntimeError, match=r'cannot be read \(7 attempts\)'):
    tasks.get_task('webdataset:http://127.0.0.1:9/a.tar')


def test_other_addresses_are_read_through_fsspec(tmp_path, monkeypatch):
  files = fsspec.filesystem('memory')
  far_away('webdataset', tmp_path)
  files.put(str(tmp_path / 'train-0.tar'), '/bucket/train-0.tar')
  files.put(str(tmp_path / 'train-1.tar'), '/bucket/test-0.tar')
  files.pipe_file('/bucket/classnames.txt', '\n'.join(NAMES).encode())
  for task in ('webdataset:memory://bucket', 'webdataset:memory://bucket/*.tar'):
    info = tasks.get_task(task).info
    assert info.splits == {'test': 20, 'train': 20} and info.class_names == NAMES
    assert read(task, 'test', [19, 0])[0] == [39, 20]
  with pytest.raises(ValueError, match='none:// needs a library'):
    tasks.get_task('parquet:none://a/b.parquet')


@pytest.mark.parametrize('kind', ['parquet', 'webdataset'])
def test_a_file_far_away_that_changed_is_not_read(tmp_path, monkeypatch, kind):
  monkeypatch.setenv('HET_PLUGIN_CACHE_GIB', '0')  # what was kept before is still right
  files = fsspec.filesystem('memory')
  far_away(kind, tmp_path)
  path = next(tmp_path.glob('train-0.*'))
  address = f'memory://changed/test{path.suffix}'
  files.put(str(path), address)
  source = tasks.get_task(f'{kind}:{address}').examples
  files.pipe_file(address, path.read_bytes() + bytes(512))
  with pytest.raises(ValueError, match='changed since the start: start again'):
    source.read('test', np.array([7]), 8, 0)


def test_the_cache_of_blocks_is_bounded(tmp_path, monkeypatch):
  monkeypatch.setenv('HET_PLUGIN_CACHE_GIB', str(10_000 / 2**30))
  files = fsspec.filesystem('memory')
  files.pipe_file('/big', bytes(range(250)) * 400)
  file = remote.RemoteFile('memory://big', 'big', remote.store_of('memory://big'))
  stat = file.stat()
  with file.reader(stat) as read_part:
    for first in range(0, 100_000, 1000):
      assert read_part(first + 3, 5, (first, 1000)) == bytes(range(250))[3:8]
  assert sum(path.stat().st_size for path in remote.cache_folder().iterdir()) <= 10_000


def test_blocks_are_for_sources_that_have_them():
  lengths = {'image': 8, 'label': 1}
  with pytest.raises(ValueError, match="order is 'blocks'; it must be 'examples' for digits"):
    data.get_dataset(data.DatasetConfig('digits', lengths, 'train', 8, order='blocks'))
