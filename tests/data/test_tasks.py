import subprocess
import sys

import numpy as np
import pytest
import seqio
from PIL import Image

from het_plugin.data import (
  DatasetConfig,
  get_dataset,
  glyphs,
  preprocess,
  task_info,
  tasks,
  tokenize,
)


def test_metadata_of_built_in_tasks():
  assert {'digits', 'glyphs_core', 'glyphs_full', 'glyphs_heldout'} <= set(tasks.names())
  assert task_info('glyphs_core').num_classes == 2297
  assert task_info('glyphs_core').class_names[0] == 'EXCLAMATION MARK'
  assert task_info('glyphs_noisy') == task_info('glyphs_core')
  assert task_info('glyphs_noisy_full') == task_info('glyphs_full')
  latin = task_info('glyphs_noisy_latin')
  assert latin.num_classes == 316 and latin.class_names[-1] == 'LATIN SMALL LETTER LONG S'
  assert latin.splits == {'train': None, 'finite': 64 * 316, 'validation': 48 * 316}
  assert task_info('digits').splits == {'train': 1438, 'test': 359}


@pytest.mark.slow
def test_images_with_labels_need_no_tensorflow(tmp_path, image_files):
  image_files.write(tmp_path / 'a', 2, '.jpg')
  program = f"""
import sys
from het_plugin.data import DatasetConfig, get_dataset
for name in ('glyphs_core', 'image_folder:{tmp_path}'):
  batches = get_dataset(DatasetConfig(name, {{'image': 8, 'label': 1}}, 'train', 2))
  assert 'grain' in sys.modules  # the thread that reads ahead must not import it
  next(batches)
sys.exit(str([name for name in ('tensorflow', 'seqio') if name in sys.modules]))
"""
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
  assert done.stderr.strip().endswith('[]')


def test_bare_paths(tmp_path, image_files):
  np.savez(tmp_path / 'a.npz', image=np.zeros((4, 3, 3), np.uint8), label=np.arange(4))
  image_files.write(tmp_path / 'dash-ed' / 'wren', 2)
  assert tasks.get_task(f'{tmp_path}/a.npz') is tasks.get_task(f'npz:{tmp_path}/a.npz')
  folder = f'{tmp_path}/dash-ed'
  assert tasks.get_task(folder) is tasks.get_task(f'image_folder:{folder}')


def test_a_tfds_name_goes_before_a_folder_of_that_name(tmp_path, monkeypatch):
  (tmp_path / 'mnist').mkdir()
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match='tfds:mnist'):
    tasks.get_task('mnist')
  with pytest.raises(ValueError, match='mnist .*class folders'):
    tasks.get_task('./mnist')


@pytest.fixture
def own_tasks():
  """Takes the tasks of a test out of the registry, whose names messages list."""
  before = set(tasks.names())
  yield
  for name in set(tasks.names()) - before:
    del tasks._TASKS[name]
    if name in seqio.TaskRegistry.names():
      seqio.TaskRegistry.remove(name)


def first_batch(task, **lengths):
  """Two test examples at 9 x 9."""
  cfg = DatasetConfig(task, {'image': 9, **lengths}, 'test', 2, shuffle=False)
  return next(get_dataset(cfg))


def test_an_added_task_runs_its_preprocessors(own_tasks):
  task = tasks.add_image_task(
    'colour_glyphs',
    glyphs.GlyphSource('heldout'),
    preprocessors=[preprocess.ToChannels(3)],
    eval_preprocessors=[preprocess.ToChannels(3)],
  )
  assert task.info.channels == 3
  batch = first_batch('colour_glyphs', label=1)
  images, labels = task.examples.read('test', np.arange(2), 9, seed=0)
  np.testing.assert_array_equal(batch['image'], np.repeat(images, 3, axis=-1))
  np.testing.assert_array_equal(batch['label'], labels)
  cfg = DatasetConfig(
    'colour_glyphs', {'image': 9, 'label': 1}, 'train', 2, augmentations=('flip',)
  )
  assert next(get_dataset(cfg))['image'].shape == (2, 9, 9, 3)
  with pytest.raises(ValueError, match="task 'colour_glyphs' "):
    tasks.add_image_task('colour_glyphs', task.examples)


def test_an_image_text_task_of_ones_own(sentencepiece_model, own_tasks):
  """With a vocabulary and preprocessing of its own, which other vocabularies keep."""
  task = tasks.add_image_text_task(
    'colour_names',
    glyphs.GlyphNameSource('heldout'),
    vocabulary=sentencepiece_model,
    preprocessors=[preprocess.ToChannels(3), preprocess.Flip()],
    eval_preprocessors=[preprocess.ToChannels(3)],
  )
  assert task_info('colour_names').vocab_size == 60
  assert task_info('colour_names').vocabulary == sentencepiece_model
  as_bytes = tasks.get_task('colour_names', 'bytes')
  assert as_bytes.info.vocab_size == 259 and as_bytes.preprocessors == task.preprocessors
  for own in (task, as_bytes):
    batch = first_batch(own, text=80)
    images, ((name,), _) = own.examples.read('test', np.arange(2), 9, seed=0)
    np.testing.assert_array_equal(batch['image'], np.repeat(images, 3, axis=-1))
    np.testing.assert_array_equal(batch['text'][0], tokenize(own.vocabulary, [name], 80)[0])
  with pytest.raises(ValueError, match="'words'"):
    task_info('colour_names', 'words')
  assert tasks.own_vocabulary('colour_names') == tasks.own_vocabulary(task) == sentencepiece_model
  assert tasks.own_vocabulary('npz_captions:/nowhere/a.npz') == 'bytes'
  read = as_bytes.loaded_vocabulary  # a vocabulary that has no name
  assert tasks.get_task('colour_names', read).loaded_vocabulary is read
  with pytest.raises(ValueError, match='vocabulary .* None; .* 1'):
    tasks.add_image_text_task(
      'no_end', glyphs.GlyphNameSource('core'), vocabulary=seqio.PassThroughVocabulary(9)
    )


def test_labels_and_captions_are_not_mixed_up():
  with pytest.raises(ValueError, match="'x' .*add_image_text_task"):
    tasks.add_image_task('x', glyphs.GlyphNameSource('core'))
  with pytest.raises(ValueError, match="'x' .*add_image_task"):
    tasks.add_image_text_task('x', glyphs.GlyphSource('core'))


def test_captioned_photographs_stay_whole(tmp_path):
  """A plain resize in training as in evaluation: no crop, and left stays left."""
  pixels = np.zeros((40, 80, 3), np.uint8)
  pixels[:, :40] = [255, 0, 0]
  Image.fromarray(pixels).save(tmp_path / 'a.png')
  (tmp_path / 'captions.csv').write_text('file,caption,split\na.png,red on the left,train\n')
  name = f'image_folder_captions:{tmp_path}'
  iterator = get_dataset(DatasetConfig(name, {'image': 8, 'text': 20}, 'train', 1))
  for _ in range(6):
    image = next(iterator)['image'][0]
    assert (image[:, :3, 0] > 0.99).all() and (image[:, 5:, 0] < -0.99).all()
