"""Files of representations: ours both ways, other people's, and wrong ones."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy
from pyarrow import parquet

from het_plugin import rows
from het_plugin.data import tasks
from het_plugin.estimators import inputs
from het_plugin.rows import Rows, files, labels
from het_plugin.runs import sources


def make(n=6, d=4, **kwargs):
  rng = np.random.default_rng(0)
  return Rows(
    {'features': rng.normal(size=(n, d)).astype(np.float32)},
    labels=(np.arange(n, dtype=np.int32) % 3)[:, None],
    index=np.arange(n)[::-1] * 7,
    **kwargs,
  )


@pytest.mark.parametrize('order', ['<', '>'])
@pytest.mark.parametrize('suffix', ['npz', 'safetensors'])
def test_ours_come_back(tmp_path, suffix, order):
  names = ('a', 'ß', '漢')
  provenance = {'checkpoint': 'runs/x', 'layer': 'pre_logits', 'step': 3}
  written = make(class_names=names, provenance=provenance)
  features = written.features.astype(f'{order}f4')  # the order of the bytes of a number
  written = dataclasses.replace(written, columns={'features': features})
  path = str(tmp_path / f'deep/er.{suffix}')
  rows.write(path, written)
  read = rows.read(path)
  for name in ('features', 'labels', 'index'):
    np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
  assert read.class_names == names and read.provenance == provenance and not read.by_name
  assert [p.name for p in (tmp_path / 'deep').iterdir()] == [f'er.{suffix}']
  rows.write(path, make(class_names=(0, 1, 2)))  # as scikit-learn's classes_ may be
  assert rows.read(path).class_names == ('0', '1', '2')
  np.testing.assert_array_equal(read.label, [0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize('suffix', ['npz', 'safetensors'])
def test_half_precision_is_widened_exactly(tmp_path, suffix):
  dtype = np.float16 if suffix == 'npz' else ml_dtypes.bfloat16
  small = make().features.astype(dtype)
  path = str(tmp_path / f'x.{suffix}')
  rows.write(path, Rows({'features': small}, make().labels, make().index))
  read = rows.read(path)
  assert read.features.dtype == np.float32
  np.testing.assert_array_equal(read.features, small.astype(np.float32))


def test_arrays_made_elsewhere(tmp_path):
  ours = make()
  names = ('embeddings', 'targets')
  arrays = dict(
    zip(names, (ours.features.astype(np.float64), ours.label.astype(np.uint8)), strict=True)
  )
  np.savez(tmp_path / 'x.npz', **arrays, class_name=np.array([b'a', b'b', b'c']))
  read = rows.read(str(tmp_path / 'x.npz'))
  assert read.class_names == ('a', 'b', 'c')
  np.testing.assert_array_equal(read.features, ours.features)
  np.testing.assert_array_equal(read.label, ours.label)
  np.testing.assert_array_equal(read.index, np.arange(6))
  safetensors.numpy.save_file(arrays, tmp_path / 'x.safetensors')
  np.testing.assert_array_equal(rows.read(str(tmp_path / 'x.safetensors')).features, ours.features)


def test_npy_with_labels_and_splits_in_one_file(tmp_path):
  ours = make()
  np.save(tmp_path / 'f.npy', ours.features)
  np.save(tmp_path / 'l.npy', ours.label)
  read = rows.read(f'{tmp_path}/f.npy,{tmp_path}/l.npy')
  np.testing.assert_array_equal(read.features, ours.features)
  split = np.array(['train', 'test', 'train', 'train', 'test', 'train'])
  np.savez(tmp_path / 'x.npz', features=ours.features, label=ours.label, split=split)
  test = rows.read(f'{tmp_path}/x.npz:test')
  np.testing.assert_array_equal(test.features, ours.features[[1, 4]])
  np.testing.assert_array_equal(test.index, [1, 4])  # ids of the file: two splits never share one
  with pytest.raises(ValueError, match="must have 'val'; there are"):
    rows.read(f'{tmp_path}/x.npz:val')


@pytest.mark.parametrize(
  'arrays,message',
  [
    (dict(features=np.ones((3, 2)), label=np.zeros(4, int)), r'labels are int64 \[4\].*N = 3'),
    (dict(features=np.ones((2, 2)), label=np.array(['a', ''])), 'example 1 has no label: its name'),
    (
      dict(features=np.ones((2, 2)), label=np.array(['a', 'c']), class_name=np.array(['a', 'b'])),
      "'c' is no name of a class; there are 2, such as 'a'",
    ),
    (
      dict(features=np.ones((1, 2)), label=np.array(['a']), class_name=np.array(['a', 'a'])),
      "two classes have the name 'a', which labels use",
    ),
    (dict(features=np.ones((3, 2))), 'exactly one of the arrays label, labels'),
    (
      dict(features=np.ones((2, 2)), label=np.array([0, 2]), class_name=np.array(['a', 'b'])),
      r'label 2 of example 1 is out of range; labels are 0 \.\. 1',
    ),
    (
      dict(features=np.array([[1.0], [np.nan], [1e39]]), label=np.zeros(3, int)),
      '2 rows that are not finite in float32, first row 1',
    ),
    (dict(features=np.ones((1, 1)), label=np.array([2**32 + 1])), 'label 4294967297'),
    (
      dict(features=np.ones((1, 1)), label=np.array([0.0])),
      r'examples; labels.astype\(int\) makes',
    ),
    (dict(features=np.ones((1, 1)), label=np.array([0.5])), 'these have fractions: of soft labels'),
    (
      dict(features=np.ones((2, 1)), label=np.array([0.0, np.nan])),
      '1 are NaN: leave out the rows without a label',
    ),
    (
      dict(features=np.ones((1, 1)), label=np.array([[0.0, np.nan]])),
      r'numpy.nan_to_num\(labels, nan=-1\).astype\(int\) makes',
    ),
    (
      dict(features=np.ones((3, 1)), label=np.array([0, -1, -1])),
      'label -1 of example 1 is out of range.*leave out the 2 rows with -1',
    ),
    (
      dict(features=np.ones((1, 1)), label=np.zeros(1, int), annotator=np.array(['bob'])),
      'annotator is <U3.*as the labels are; numpy.unique',
    ),
    (
      dict(features=np.ones((2, 2)), label=np.zeros(2, int), index=np.zeros(2, int)),
      'ids in index must be distinct',
    ),
    (
      dict(features=np.ones((1, 1)), label=np.zeros(1, int), index=np.array([2**63], np.uint64)),
      'index has an example id below 0 or above',
    ),
    (
      dict(features=np.ones((3, 2)), label=np.eye(3, dtype=int)),
      r'labels are \[3, 3\] of 0 and 1, which mark classes',
    ),
    (
      dict(features=np.ones((1, 1)), label=np.zeros(1, int), class_names=np.array(['cat'])),
      "it has 'class_names': did you mean 'class_name'",
    ),
    (
      dict(features=np.ones((1, 1)), label=np.zeros(1, int), splits=np.array(['train'])),
      "it has 'splits': did you mean 'split'",
    ),
    (
      dict(features=np.ones((1, 1)), label=np.zeros(1, int), label_weight=np.ones(1, int)),
      r'label_weight is int64 \[1\]; it must be floating point \[1, 1\]',
    ),
  ],
)
def test_wrong_arrays_are_one_sentence_with_the_file(tmp_path, arrays, message):
  np.savez(tmp_path / 'x.npz', **arrays)
  with pytest.raises(ValueError, match=message) as error:
    rows.read(str(tmp_path / 'x.npz'))
  assert str(tmp_path / 'x.npz') in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('mapped', [False, True])
@pytest.mark.parametrize('suffix', ['npz', 'safetensors'])
def test_a_damaged_file_is_noticed(tmp_path, suffix, mapped):
  """Cut short, or with a bit changed, it reads as it was or is an error of one sentence."""
  path = tmp_path / f'x.{suffix}'
  want = make(class_names=('a', 'b', 'c'), provenance={'step': 3})
  rows.write(path, want)
  whole = path.read_bytes()
  unnoticed = 0
  rng = np.random.default_rng(0)
  for position in (0, 1, *rng.integers(2, len(whole), 80)):
    flipped = bytearray(whole)
    flipped[position] ^= 1 << int(rng.integers(8))
    for damaged in (whole[:position], bytes(flipped)):
      path.write_bytes(damaged)
      try:
        read = rows.read(str(path), mapped=mapped)
      except ValueError as error:
        assert str(path) in str(error) and '\n' not in str(error)
        continue
      unnoticed += 1
      np.testing.assert_array_equal(read.features, want.features)
      np.testing.assert_array_equal(read.labels, want.labels)
      np.testing.assert_array_equal(read.index, want.index)
      # A name that is damaged itself leaves a file as others make it, without names.
      assert read.class_names in (want.class_names, None)
  assert unnoticed < 20


def test_wrong_files(tmp_path):
  (tmp_path / 'x.npz').write_bytes(b'not a zip')
  (tmp_path / 'x.txt').write_text('1 2 3')
  for name, message in [
    ('x.npz', 'cannot be read'),
    ('y.npz', 'does not exist'),
    ('y.parquet', 'y.parquet does not exist'),
    ('x.txt', 'must end in .csv, .npy, .npz, .parquet or'),
    ('f.npy', 'write FEATURES.npy,LABELS.npy'),
    ('f.npy,l.npy', 'f.npy does not exist'),
  ]:
    with pytest.raises(ValueError, match=message):
      rows.read(str(tmp_path / name))
  empty = {'features': np.ones((0, 2), np.float32), 'label': np.zeros(0, int)}
  safetensors.numpy.save_file(empty, tmp_path / 'x.safetensors')
  for mapped in (False, True):
    with pytest.raises(ValueError, match='N and D at least 1'):
      rows.read(str(tmp_path / 'x.safetensors'), mapped=mapped)
  safetensors.numpy.save_file({'features': np.ones((9, 2), np.float32)}, tmp_path / 'x.safetensors')
  (tmp_path / 'x.safetensors').write_bytes((tmp_path / 'x.safetensors').read_bytes()[:-4])
  with pytest.raises(ValueError, match='cut short: features ends at byte 72 of 68'):
    rows.read(str(tmp_path / 'x.safetensors'), mapped=True)
  with pytest.raises(ValueError, match='must end in .npz or .safetensors'):
    rows.write(tmp_path / 'x.npy', make())


def test_several_files_are_one(tmp_path):
  whole = make(10, class_names=('a', 'b', 'c'))
  for number in range(3):
    part = whole.take(slice(4 * number, 4 * number + 4))
    rows.write(tmp_path / f'train-{number:05}-of-00003.safetensors', part)
  pattern = str(tmp_path / 'train-*.safetensors')
  for mapped in (False, True):
    read = rows.read(pattern, mapped=mapped)
    assert read.class_names == whole.class_names
    np.testing.assert_array_equal(read.index, whole.index)
    np.testing.assert_array_equal(np.asarray(read.features), whole.features)
    for some in (slice(3, 9), np.array([9, 0, 4, 4]), whole.labels[:, 0] == 1, slice(4, 8)):
      np.testing.assert_array_equal(read.take(some).features, whole.features[some])
  last = tmp_path / 'train-00002-of-00003.safetensors'
  wider = {'features': np.ones((2, 5), np.float32)}
  two = whole.take(slice(8, 10))
  for wrong, message in (
    (dataclasses.replace(two, columns=wider), r'float32 \[5\].* has .*float32 \[4\].*: all files'),
    (dataclasses.replace(two, class_names=('a', 'b', 'd')), 'has classes .*d.* must have the same'),
    (whole.take(slice(2)), 'the example 56 is there twice'),
  ):
    rows.write(last, wrong)
    with pytest.raises(ValueError, match=message):
      rows.read(pattern)
  last.unlink()
  with pytest.raises(ValueError, match='number 2 of 3 is missing'):
    rows.read(pattern)
  with pytest.raises(ValueError, match='names no file'):
    rows.read(str(tmp_path / 'test-*.npz'))
  for part in range(2):  # made elsewhere, without ids
    np.savez(tmp_path / f'test-{part}.npz', x=np.ones((3, 2)), y=np.arange(3))
  assert rows.read(str(tmp_path / 'test-*.npz')).index.tolist() == [0, 1, 2, 3, 4, 5]


def write_parquet(path, rows_per_group=7, metadata=None, **columns):
  table = pa.table(columns).replace_schema_metadata(metadata)
  parquet.write_table(table, path, row_group_size=rows_per_group)
  return str(path)


@pytest.mark.parametrize('kind', [pa.list_(pa.float32()), pa.list_(pa.float16(), 3)])
def test_columns_of_parquet_are_rows(tmp_path, kind, monkeypatch):
  monkeypatch.setattr(files, '_PARQUET_ROWS', 5)
  x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float16)
  names = {'info': {'features': {'label': {'names': ['a', 'b', 'c', 'd'], '_type': 'ClassLabel'}}}}
  path = write_parquet(
    tmp_path / 'a.parquet',
    metadata={'huggingface': json.dumps(names)},
    embeddings=pa.array(list(x), kind),
    label=np.arange(20) % 4,
    caption=['text'] * 20,
    split=['train'] * 12 + ['test'] * 8,
  )
  for mapped in (False, True):
    found = rows.read(path, mapped=mapped)
    np.testing.assert_array_equal(found.features, x)
    assert found.class_names == ('a', 'b', 'c', 'd') and found.label[5] == 1
    assert isinstance(found.features, np.memmap) == mapped
  assert len(rows.read(f'{path}:test')) == 8
  found = sources.open_source(path).rows()
  assert isinstance(found.features, np.memmap) and len(found) == 20
  votes = [[k % 4] * (1 + k % 3) for k in range(20)]
  path = write_parquet(tmp_path / 'b.parquet', features=list(x.astype(float)), labels=votes)
  found = rows.read(path).labels
  assert found.shape == (20, 3) and [y[y >= 0].tolist() for y in found] == votes


NAMES = np.array(['dog', 'ant', 'dog', 'cät', 'ant', 'dog'])  # the numbers 2 0 2 1 0 2


@pytest.mark.parametrize('kind', ['npz', 'bytes', 'npy', 'text', 'dictionary', 'lists'])
def test_names_are_labels(tmp_path, kind, monkeypatch):
  monkeypatch.setattr(files, '_PARQUET_ROWS', 4)
  monkeypatch.setattr(labels, '_BLOCK', 4)
  x = make().features
  path = str(tmp_path / 'a.npz')
  if kind == 'npy':
    np.save(tmp_path / 'x.npy', x)
    np.save(tmp_path / 'y.npy', NAMES)
    path = f'{tmp_path}/x.npy,{tmp_path}/y.npy'
  elif kind in ('npz', 'bytes'):
    np.savez(path, x=x, y=NAMES if kind == 'npz' else np.char.encode(NAMES, 'utf-8'))
  else:
    y = pa.array(NAMES)
    y = {'text': y, 'dictionary': y.dictionary_encode()}.get(kind, [[name] for name in NAMES])
    path = write_parquet(tmp_path / 'a.parquet', x=list(x), y=y)
  found = rows.read(path)
  assert found.by_name and found.class_names == ('ant', 'cät', 'dog')
  assert found.label.tolist() == [2, 0, 2, 1, 0, 2]


def test_names_have_the_numbers_of_the_classes_that_a_file_states(tmp_path):
  x = make().features
  votes = [['b'], ['a', 'c'], ['c', 'c', 'a']]
  read = rows.read(write_parquet(tmp_path / 'a.parquet', x=list(x[:3]), y=votes))
  assert read.labels.tolist() == [[1, -1, -1], [0, 2, -1], [2, 2, 0]]
  np.savez(tmp_path / 'b.npz', logits=x[:2, :2], y=['b', 'a'], class_name=['b', 'a'])
  read = rows.read(f'{tmp_path}/b.npz', 'log_prob')
  assert read.label.tolist() == [0, 1] and read.by_name
  np.savez(tmp_path / 'b.npz', logits=x[:2, :2], y=['b', 'a'])
  with pytest.raises(ValueError, match=r'labels are names, and no array class_name \[K\]'):
    rows.read(f'{tmp_path}/b.npz', 'log_prob')
  for i, some in enumerate((slice(2), slice(3, 6))):
    np.savez(tmp_path / f's-{i}.npz', x=x[some], y=NAMES[some])
  read = rows.read(f'{tmp_path}/s-*.npz')  # with other classes in each
  assert read.class_names == ('ant', 'cät', 'dog') and read.label.tolist() == [2, 0, 1, 0, 2]
  np.savez(tmp_path / 'o.npz', x=x, y=NAMES.astype(object))
  with pytest.raises(ValueError, match=r'array of objects, which is not read: names.astype\(str\)'):
    rows.read(f'{tmp_path}/o.npz')


def test_names_of_a_test_file_have_the_numbers_of_the_training(tmp_path):
  x = make().features
  train = make(class_names=('ant', 'cät', 'dog'), by_name=True)
  test = Rows({'features': x[:2]}, np.array([[0], [1]]), np.arange(2), class_names=('cät', 'dog'))
  test = dataclasses.replace(test, by_name=True)
  paired = rows.paired(('a', 'b'), train.meaning, test)
  assert paired.label.tolist() == [1, 2] and paired.class_names == train.class_names
  stated = dataclasses.replace(train, class_names=('dog', 'cät', 'ant'), by_name=False)
  assert rows.paired(('a', 'b'), stated.meaning, test).label.tolist() == [1, 0]
  unknown = dataclasses.replace(test, class_names=('cät', 'elk'))
  with pytest.raises(
    ValueError, match="b: 'elk' is no name of a class; there are 3, such as 'ant' in a"
  ):
    rows.paired(('a', 'b'), train.meaning, unknown)
  for pair in ((train, make()), (make(), train)):
    with pytest.raises(ValueError, match='are names, and those of . numbers without names'):
      rows.paired(('a', 'b'), pair[0].meaning, pair[1])
  written = dataclasses.replace(test, by_name=False)
  assert rows.paired(('a', 'b'), stated.meaning, written).label.tolist() == [1, 0]
  for columns, names in (
    ({'log_prob': np.log([[0.5, 0.5]] * 2)}, ('cät', 'dog')),  # a class is missing
    (test.columns, ('cät', 'elk')),
    (test.columns, ('cät', 'cät')),
  ):
    other = dataclasses.replace(written, columns=columns, class_names=names)
    with pytest.raises(ValueError, match="label 0 is 'cät' in b and 'dog' in a"):
      rows.paired(('a', 'b'), stated.meaning, other)
  log_prob = np.log([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])
  other = dataclasses.replace(
    written, columns={'log_prob': log_prob}, class_names=train.class_names
  )
  paired = rows.paired(('a', 'b'), stated.meaning, other)
  np.testing.assert_array_equal(paired.log_prob, log_prob[:, ::-1])
  assert paired.label.tolist() == [2, 1]


@pytest.mark.parametrize('suffix', ['npz', 'safetensors'])
def test_a_file_keeps_that_its_labels_were_names(tmp_path, suffix):
  np.savez(tmp_path / 'a.npz', x=make().features, y=NAMES)
  path = str(tmp_path / f'b.{suffix}')
  rows.write(path, rows.read(str(tmp_path / 'a.npz')))
  assert rows.read(path).by_name
  _, labels, _ = inputs.open_features(path)
  assert labels.tolist() == NAMES.tolist()


def test_columns_of_csv_are_features(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text('a,label,b,index,split\n1,dog,2.5,7,test\n-3,cat,4e2,5,train\n', 'utf-8-sig')
  read = rows.read(str(path))
  assert read.features.tolist() == [[1.0, 2.5], [-3.0, 400.0]]
  assert read.class_names == ('cat', 'dog') and read.by_name
  assert (read.label.tolist(), read.index.tolist()) == ([1, 0], [7, 5])
  assert rows.read(f'{path}:train').index.tolist() == [5]
  (tmp_path / 'b.csv').write_text('b,label,a,index\n1,dog,2.5,8\n')
  other = rows.read(str(tmp_path / 'b.csv'))
  with pytest.raises(ValueError, match="feature 0 is 'b' in y and 'a' in x: both must have the"):
    rows.paired(('x', 'y'), read.meaning, other)
  with pytest.raises(ValueError, match=r"b.csv has feature names \['b', 'a'\] and .*\['a', 'b'\]"):
    rows.read(str(tmp_path / '[ab].*csv'))
  task = tasks.get_task(f'features:{path}')
  assert dict(task.info.splits) == {'test': 1, 'train': 1}
  parquet_path = write_parquet(tmp_path / 'a.parquet', x=[[1.0], [2.0]], y=[0, 1], split=['a', 'b'])
  assert dict(tasks.get_task(f'features:{parquet_path}').info.splits) == {'a': 1, 'b': 1}
  path.write_text('a,b,y\n1,true,0\n2,false,1\n')
  assert sources.open_source(str(path)).rows().features.tolist() == [[1.0, 1.0], [2.0, 0.0]]


@pytest.mark.parametrize(
  'text, message',
  [
    ('', 'a.csv: Empty CSV file'),
    ('a,y\n', 'it has no rows'),
    ('y\n1\n', 'it has no columns of features'),
    ('a,b,y\n1,2\n', 'Expected 3 columns, got 2'),
    ('1,2,3\n4,5,6\n', 'first line must name exactly one column label, .*; there are 1, 2, 3'),
    ('a,y,label\n1,2,3\n', 'exactly one column .*; there are a, y, label'),
    (',b,y\n0,1,2\n', 'column 0 has no name: .*index=False'),
    ('a,a,y\n0,1,2\n', 'two columns have the name a'),
    ('a,indx,y\n0,1,2\n', "has 'indx': did you mean 'index'"),
    ('a,b,y\n0,x.jpg,2\n', "column b has 'x.jpg': features are numbers; leave it out"),
    ('a,b,y\n0,1,2\n3,,4\n', 'b has no value in row 1'),
    ('a,b,y\n0,1,2\n3,1e50,4\n', '1 rows that are not finite in float32, first row 1'),
  ],
)
def test_wrong_csv(tmp_path, text, message):
  (tmp_path / 'a.csv').write_text(text)
  with pytest.raises(ValueError, match=message):
    rows.read(str(tmp_path / 'a.csv'))


@pytest.mark.parametrize(
  'columns, message',
  [
    (
      {'label': [0, 1], 'vector': [[1.0], [1.0]]},
      'exactly one of the arrays features.*there are the columns label, vector',
    ),
    ({'x': [[1.0], [1.0, 2.0]], 'y': [0, 1]}, 'x has 2 values in row 1 and 1 in row 0'),
    ({'x': [[1.0], None], 'y': [0, 1]}, 'x has no value in row 1'),
    ({'x': [[1.0], [np.nan]], 'y': [0, 1]}, 'not finite in float32, first row 1'),
  ],
)
def test_wrong_columns_of_parquet(tmp_path, columns, message):
  path = write_parquet(tmp_path / 'a.parquet', **columns)
  with pytest.raises(ValueError, match=f'a.parquet: .*{message}'):
    rows.read(path)
