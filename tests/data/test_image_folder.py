import os
import shutil

import numpy as np
import pytest
from PIL import Image

from het_plugin import reporting
from het_plugin.data import image_folder
from het_plugin.data.image_folder import ImageFolderSource
from het_plugin.data.preprocess import decode


def test_split_folders(tmp_path, image_files):
  cats = image_files.write(tmp_path / 'train' / 'cat', 3, '.png')
  image_files.write(tmp_path / 'train' / 'ant', 2, '.JPG')
  image_files.write(tmp_path / 'validation' / 'cat', 1, '.jpeg')
  source = ImageFolderSource(str(tmp_path))
  assert source.info.class_names == ('ant', 'cat')
  assert source.info.splits == {'train': 5, 'validation': 1}
  images, labels = source.read('train', np.array([4, 0]), 16, seed=0)
  assert source.describe('train', 4) == str(cats[2])
  np.testing.assert_array_equal(labels, [[1], [0]])
  picture, photo = (np.asarray(decode(image)) for image in images)
  np.testing.assert_array_equal(picture, np.asarray(Image.open(cats[2])))
  assert photo.shape == (20, 30, 3) and photo.dtype == np.uint8


def test_a_class_may_be_called_train(tmp_path, image_files):
  for name in ('car', 'train'):
    image_files.write(tmp_path / name, 2)
  assert ImageFolderSource(str(tmp_path)).info.class_names == ('car', 'train')
  (tmp_path / 'car').rename(tmp_path / 'val')
  with pytest.raises(ValueError, match='holds no class folders'):
    ImageFolderSource(str(tmp_path))


def test_images_beside_the_folders_of_classes_are_named(tmp_path, image_files, caplog):
  for folder in ('train/ant', 'test/ant', 'train', '.'):
    image_files.write(tmp_path / folder, 1)
  assert ImageFolderSource(str(tmp_path)).info.splits == {'train': 1, 'test': 1}
  assert caplog.messages == [
    f'1 images are in no class folder and are left out, such as {tmp_path / folder}/000.png.'
    for folder in ('.', 'train')
  ]


def test_class_folders_are_split_once_and_for_all(tmp_path, image_files):
  for name, count in (('a', 20), ('b', 2), ('c', 1)):
    image_files.write(tmp_path / name, count)
  source = ImageFolderSource(str(tmp_path))
  assert source.info.splits == {'train': 18 + 1 + 1, 'validation': 2 + 1}
  names = {
    split: [source.describe(split, i) for i in range(n)] for split, n in source.info.splits.items()
  }
  assert len(set(names['train'] + names['validation'])) == 23
  again = ImageFolderSource(str(tmp_path))
  assert again.info == source.info and again.info.version.startswith('23 files ')
  assert [again.describe('validation', i) for i in range(3)] == names['validation']
  shutil.copy(tmp_path / 'a' / '000.png', tmp_path / 'a' / '000_again.png')  # comes second
  more = ImageFolderSource(str(tmp_path))
  kept = {more.describe('validation', i) for i in range(3)}
  assert len(kept & set(names['validation'])) >= 2


def test_the_version_knows_names_and_labels(tmp_path, image_files):
  first, *_ = image_files.write(tmp_path / 'train' / 'ant', 3)
  image_files.write(tmp_path / 'train' / 'cat', 3, seed=1)
  versions = [ImageFolderSource(str(tmp_path)).info.version]
  for name, other in (('ant', 'bee'), ('cat', 'ant'), ('bee', 'cat')):  # the same names in both
    (tmp_path / 'train' / name).rename(tmp_path / 'train' / other)
  versions.append(ImageFolderSource(str(tmp_path)).info.version)
  first.rename(first.with_name('001_b.png'))
  versions.append(ImageFolderSource(str(tmp_path)).info.version)
  (tmp_path / 'labels.csv').write_text('file,label\ntrain/ant/001.png,cat\n')
  versions.append(ImageFolderSource(str(tmp_path)).info.version)
  (tmp_path / 'train' / 'cat').rename(tmp_path / 'train' / 'dog')
  (tmp_path / 'labels.csv').write_text('file,label\ntrain/ant/001.png,dog\n')
  versions.append(ImageFolderSource(str(tmp_path)).info.version)
  assert len(set(versions)) == 5 and all(x.startswith('6 files ') for x in versions)


def test_wrong_folders_are_named(tmp_path, image_files):
  with pytest.raises(ValueError, match='image_folder:/nowhere: '):
    ImageFolderSource('/nowhere')
  with pytest.raises(ValueError, match='class folders'):
    ImageFolderSource(str(tmp_path))
  image_files.write(tmp_path / 'train' / 'a', 1)
  image_files.write(tmp_path / 'validation' / 'b', 1)
  with pytest.raises(ValueError, match=r"validation .*train .*\['b'\]"):
    ImageFolderSource(str(tmp_path))
  (tmp_path / 'train' / 'b').mkdir()
  (tmp_path / 'train' / 'b' / 'notes.txt').write_text('no image')
  with pytest.raises(ValueError, match='b .*no images'):
    ImageFolderSource(str(tmp_path))
  (tmp_path / 'train').rename(tmp_path / 'Train')
  with pytest.raises(ValueError, match="Train holds no images; .* one must be named 'train'"):
    ImageFolderSource(str(tmp_path))


def test_a_class_that_is_not_named_in_utf8_is_named(tmp_path, image_files):
  image_files.write(tmp_path / 'tea', 1)
  os.rename(tmp_path / 'tea', os.fsencode(tmp_path) + b'/caf\xe9')
  with pytest.raises(ValueError, match=r"class folder b'caf\\xe9' is not named in UTF-8"):
    ImageFolderSource(str(tmp_path))


def test_classes_that_differ_in_unicode_composition_only_are_named(tmp_path, image_files):
  for name in ('caf\xe9', 'cafe\u0301'):
    image_files.write(tmp_path / name, 1)
  message = r"classes 'cafe\\u0301' and 'caf\\xe9' are both written .* one name"
  with pytest.raises(ValueError, match=message):
    ImageFolderSource(str(tmp_path))


def test_what_is_no_regular_file_is_unreadable(tmp_path):
  (tmp_path / 'dangling.jpg').symlink_to('nowhere')
  (tmp_path / 'folder.jpg').mkdir()
  os.mkfifo(tmp_path / 'pipe.jpg')
  assert [image_folder.read_bytes(path) for path in tmp_path.iterdir()] == [None] * 3


def test_a_table_written_for_spreadsheets_has_the_same_names(tmp_path, image_files):
  for name in ("'=1", '=1'):
    image_files.write(tmp_path / name, 2)
  rows = [{'file': f'{name}/000.png', 'label': '=1'} for name in ("'=1", '=1')]
  reporting.write_csv(['file', 'label'], rows, tmp_path / 'labels.csv')
  source = ImageFolderSource(str(tmp_path))
  assert source.info.class_names == ("'=1", '=1') and source.info.splits['train'] == 2
  found = [
    source.read(split, np.array([i]), 8, seed=0)[1]['label'][0, 0]
    for split, number in source.info.splits.items()
    for i in range(number)
    if source.file(split, i).endswith('000.png')
  ]
  assert found == [1, 1]


def test_labels_in_a_table(tmp_path, image_files):
  for split, count in (('train', 3), ('validation', 1)):
    for name in ('ant', 'cat'):
      image_files.write(tmp_path / split / name, count)
  table = tmp_path / 'labels.csv'
  table.write_text(
    'file,label,weight\ntrain/cat/000.png,cat,2\ntrain/cat/000.png,ant,2\n'
    './train/cat/000.png,cat,2\ntrain//ant/001.png,cat,0.5\n'
  )
  source = ImageFolderSource(str(tmp_path))
  assert source.info.label_fields == ('label_weight', 'weight') and source.info.max_labels == 3
  _, labels = source.read('train', np.array([3, 1, 0]), 8, seed=0)
  np.testing.assert_array_equal(labels['label'], [[1, 0, 1], [1, -1, -1], [0, -1, -1]])
  np.testing.assert_allclose(labels['label_weight'], [[1 / 3] * 3, [1, 0, 0], [1, 0, 0]])
  np.testing.assert_array_equal(labels['weight'], [2, 0.5, 1])
  table.write_text(
    'file,label,annotator\ntrain/cat/000.png,cat,eva\ntrain/cat/000.png,ant,ada\n'
    'validation/ant/000.png,cat,ben\n'
  )
  source = ImageFolderSource(str(tmp_path))
  assert source.info.annotators == ('ada', 'ben', 'eva')
  _, labels = source.read('train', np.array([3, 1]), 8, seed=0)
  np.testing.assert_array_equal(labels['annotator'], [[2, 0], [-1, -1]])
  for text, message in {
    'file,label,annotator\ntrain/cat/000.png,cat,\n': 'line 2: .*annotator',
    'file,label\ntrain/cat/000.png,dog\n': "line 2: label 'dog' ",
    'file,label\ntrain/cat/9.png,cat\n': "image 'train/cat/9.png'",
    'file,label\n../train/cat/9.png,cat\n': "image '../train/cat/9.png'",
    'file,label,label_weight\ntrain/cat/000.png,cat,0.5\n': 'weights .* 0.5;',
    'file,label,weight\ntrain/cat/000.png,cat,1\ntrain/cat/000.png,ant,3\n': 'line 3: weight is 3',
    'file,label,weights\ntrain/cat/000.png,cat,2\n': "labels.csv has 'weights': .* 'weight'",
    'file\n': r"labels.csv .*\['label'\]",
  }.items():
    table.write_text(text)
    with pytest.raises(ValueError, match=message):
      ImageFolderSource(str(tmp_path))
