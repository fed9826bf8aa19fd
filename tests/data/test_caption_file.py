import json

import numpy as np
import pytest

from het_plugin.data import DatasetConfig, get_dataset, preprocess
from het_plugin.data.image_folder import CaptionFileSource

RECORDS = [
  {'file': 'a/000.png', 'caption': 'a dog, on the left'},
  {'file': 'a/001.png', 'caption': ['a "cat"', 'ein Kätzchen']},
  {'file': 'a/000.png', 'caption': 'another caption'},
  {'file': 'b.jpg', 'caption': 'a bird', 'id': 7},
]


@pytest.fixture
def photos(tmp_path, image_files):
  image_files.write(tmp_path / 'a', 2)
  image_files.write(tmp_path, 1, '.jpg')[0].rename(tmp_path / 'b.jpg')
  return tmp_path


def write_json(path, records=RECORDS):
  lines = [json.dumps(record, ensure_ascii=False) for record in records]
  path.write_text('\ufeff' + '\r\n'.join([*lines, '', '']), 'utf-8')  # as Windows writes it
  return str(path)


def pairs(source):
  """{description: captions} of every example, and the split it is in."""
  found = {}
  for split, count in source.info.splits.items():
    images, captions = source.read(split, np.arange(count), 8, seed=0)
    for i, (image, texts) in enumerate(zip(images, captions, strict=True)):
      assert preprocess.decode(image) is not None
      found[source.describe(split, i)] = (split, list(texts))
  return found


@pytest.mark.parametrize('form', ['.jsonl', '.csv'])
def test_forms_hold_the_same(photos, form):
  if form == '.jsonl':
    write_json(photos / 'captions.jsonl')
  else:
    rows = [['file', 'id', 'caption'], ['a/000.png', '', 'a dog, on the left']]
    rows += [['a/001.png', '', 'a "cat"'], ['a/001.png', '', 'ein Kätzchen']]
    rows += [['a/000.png', '', 'another caption'], ['b.jpg', '7', 'a bird']]
    quoted = [['"' + field.replace('"', '""') + '"' for field in row] for row in rows]
    text = '\r\n'.join(','.join(row) for row in quoted)
    (photos / f'captions{form}').write_text('\ufeff' + text, 'utf-8')
  source = CaptionFileSource(str(photos))
  assert source.info.channels == 3 and source.info.splits == {'train': 2, 'validation': 1}
  assert source.info.version == '3 images, 5 captions f451fad7'
  texts = {name: captions for name, (_, captions) in pairs(source).items()}
  assert texts == {
    str(photos / 'a' / '000.png'): ['a dog, on the left', 'another caption'],
    str(photos / 'a' / '001.png'): ['a "cat"', 'ein Kätzchen'],
    str(photos / 'b.jpg'): ['a bird'],
  }
  named = CaptionFileSource(str(photos / f'captions{form}'))
  assert pairs(named) == pairs(source)


def test_what_is_missing_is_an_unreadable_record(photos, caplog):
  """An image that is not there, one that is cut off, captions that are blank or null."""
  (photos / 'b.jpg').write_bytes((photos / 'b.jpg').read_bytes()[:200])
  records = [
    {'file': 'a/000.png', 'caption': ''},
    {'file': 'nowhere.png', 'caption': 'lost'},
    {'file': 'a/001.png', 'caption': 'fine'},
    {'file': 'b.jpg', 'caption': 'half a bird'},
    {'file': 'nothing.jpg', 'caption': None},
    {'file': 'a/../a/000.png', 'caption': []},
  ]
  write_json(photos / 'captions.jsonl', [{**r, 'split': 'train'} for r in records])
  settings = dict(
    mixture_or_task_name=f'image_folder_captions:{photos}',
    task_feature_lengths={'image': 8, 'text': 8},
    split='train',
    batch_size=6,
    shuffle=False,
  )
  iterator = get_dataset(DatasetConfig(**settings, max_corrupt_fraction=0.9))
  for _ in range(2):  # in the second epoch too
    batch = next(iterator)
    np.testing.assert_array_equal(batch['mask'], [0, 0, 1, 0, 0, 0])
    assert not batch['text'][batch['mask'] == 0].any()
    assert (batch['image'][batch['mask'] == 0] == -1).all()
  names = set(iterator.corrupt_records)
  missing = 'its caption is missing or empty'
  assert names == {
    f'{photos}/a/000.png ({missing})',
    f'{photos}/nowhere.png',
    f'{photos}/b.jpg',
    f'{photos}/nothing.jpg ({missing})',
    f'{photos}/a/../a/000.png ({missing})',
  }
  assert f'image-text pair {photos}/a/000.png ({missing})' in caplog.text
  with pytest.raises(ValueError, match='of 6 image-text pairs '):
    next(get_dataset(DatasetConfig(**settings, max_corrupt_fraction=0.5)))


def test_no_such_file(tmp_path):
  with pytest.raises(ValueError, match='image_folder_captions:/nowhere: '):
    CaptionFileSource('/nowhere')
  with pytest.raises(ValueError, match=r' 0 of \[.captions.jsonl'):
    CaptionFileSource(str(tmp_path))
  for name in ('captions.csv', 'captions.tsv'):
    (tmp_path / name).write_text('file,caption\n')
  with pytest.raises(ValueError, match=r' 2 of \[.captions.jsonl'):
    CaptionFileSource(str(tmp_path))
  with pytest.raises(ValueError, match='captions.csv .*no records'):
    CaptionFileSource(str(tmp_path / 'captions.csv'))
  (tmp_path / 'captions.txt').write_text('x')
  with pytest.raises(ValueError, match=r"captions.txt.*\['.jsonl', '.csv', '.tsv'\]"):
    CaptionFileSource(str(tmp_path / 'captions.txt'))


BAD_FILES = {
  "'file' is '../a.png'": '{"file": "../a.png", "caption": "a"}',
  "'file' is '/etc/a.png'": 'file,caption\n/etc/a.png,a',
  'captions.jsonl, line 2 .*JSON': '{"file": "a", "caption": "b"}\n{"file": ',
  "line 1: .*'file' and 'caption'": '{"file": "a"}',
  "line 2: 'split' is 'y'; .*'x'": '{"file": "a", "caption": "b", "split": "x"}\n'
  '{"file": "a", "caption": "c", "split": "y"}',
  r"captions.csv .*\['caption'\]; .*\['file', 'text'\]": ('file,text\na,b\n'),
  r"captions.csv .* twice: \['file', 'caption', 'caption'\]": 'file,caption,caption\na,b,c\n',
  "captions.csv has 'splits': .* 'split'": 'file,caption,splits\na,b,test\n',
  "line 1 has 'Split': .* 'split'": '{"file": "a", "caption": "b", "Split": "test"}',
  "captions.csv, line 3 .*','": ('file,caption\na,b\nc,d, e\n'),
  'captions.csv, line 4 is not valid: .* quoted': 'file,caption\na,"b\nc,d\ne,"f"\n',  # not 2 texts
}


@pytest.mark.parametrize('message', BAD_FILES)
def test_bad_files(tmp_path, message):
  text = BAD_FILES[message]
  (tmp_path / f'captions.{"jsonl" if text.startswith("{") else "csv"}').write_text(text)
  with pytest.raises(ValueError, match=message):
    CaptionFileSource(str(tmp_path))


def test_rows_of_a_table_that_end_early(tmp_path, image_files):
  """A row without a caption is an unreadable record, one without a split an error."""
  image_files.write(tmp_path, 2)
  table = tmp_path / 'captions.csv'
  table.write_text('file,caption\n000.png\n001.png,second\n')
  source = CaptionFileSource(str(tmp_path))
  texts = [source.read(split, np.array([0]), 8, seed=0)[1][0] for split in source.info.splits]
  assert sorted(texts) == [[], ['second']]
  table.write_text('file,caption,split\n000.png,first\n001.png,second,train\n')
  with pytest.raises(ValueError, match="000.png .*'split'"):
    CaptionFileSource(str(tmp_path))
