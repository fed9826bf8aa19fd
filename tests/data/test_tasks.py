import numpy as np
import pytest
import seqio

from het_plugin.data import glyphs, preprocess, task_info, tasks


def test_built_in_tasks_are_registered_with_seqio():
  assert {'digits', 'glyphs_core', 'glyphs_full', 'glyphs_heldout'} <= set(
    seqio.TaskRegistry.names()
  )
  assert task_info('glyphs_core').num_classes == 2297
  assert task_info('glyphs_core').class_names[0] == 'EXCLAMATION MARK'
  assert task_info('digits').splits == {'train': 1438, 'test': 359}


@pytest.mark.parametrize('folder', ['plain', 'with space', 'dash-ed/ümlaut', 'x' * 150])
def test_paths_that_seqio_names_refuse(tmp_path, folder):
  path = tmp_path / folder / 'my data.npz'
  path.parent.mkdir(parents=True)
  np.savez(path, image=np.zeros((4, 3, 3), np.uint8), label=np.arange(4))
  task = tasks.get_task(f'npz:{path}')
  assert seqio.TaskRegistry.get(task.name) is task
  assert tasks.get_task(f'npz:{path}') is task
  assert tasks.get_task(task.name) is task and tasks.get_task(task) is task


def test_paths_that_look_alike_are_different_tasks(tmp_path):
  for name in ('a-b', 'a_b'):
    np.savez(tmp_path / f'{name}.npz', image=np.zeros((2, 3, 3), np.uint8), label=np.arange(2))
  names = {tasks.get_task(f'npz:{tmp_path}/{name}.npz').name for name in ('a-b', 'a_b')}
  assert len(names) == 2


@pytest.mark.parametrize('name', ['glyphs', 'npz:', 'image_folder:', 'foo:bar', 'two words', ''])
def test_unknown_names_list_the_valid_ones(name):
  with pytest.raises(ValueError) as error:
    task_info(name)
  for valid in ('glyphs_core', 'digits', 'npz:PATH', 'image_folder:PATH', 'tfds:NAME'):
    assert valid in str(error.value)


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
  with pytest.raises(ValueError, match='mnist holds no class folders'):
    tasks.get_task('./mnist')


@pytest.mark.parametrize(
  'path,message',
  [
    ('/nowhere/x.npz', 'npz:/nowhere/x.npz: there is no such file'),
    ('/nowhere/birds', "mixture_or_task_name is '/nowhere/birds'; it must be one of .* existing"),
    ('/nowhere/x.npy', 'a path that ends in .npz'),
  ],
)
def test_bare_paths_that_do_not_exist(path, message):
  with pytest.raises(ValueError, match=message):
    task_info(path)


def test_an_added_task_runs_its_preprocessors():
  task = tasks.add_image_task(
    'colour_glyphs',
    glyphs.GlyphSource('heldout'),
    preprocessors=[preprocess.to_channels(3)],
    eval_preprocessors=[preprocess.to_channels(3)],
  )
  dataset = task.get_dataset({'image': 9, 'label': 1}, 'test', shuffle=False)
  (example,) = dataset.take(1).as_numpy_iterator()
  images, labels = task.examples.read('test', np.arange(1), 9, seed=0)
  np.testing.assert_array_equal(example['image'], np.repeat(images[0], 3, axis=-1))
  np.testing.assert_array_equal(example['label'], labels[0])


def test_a_name_is_taken_once():
  with pytest.raises(ValueError, match='digits'):
    tasks.add_image_task('digits', glyphs.GlyphSource('core'))
