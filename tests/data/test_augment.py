import dataclasses

import numpy as np
import pytest

from het_plugin.data import DatasetConfig, augment, get_dataset, tasks

PHOTO = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
IMAGES = {'rgb': PHOTO, 'grey': PHOTO[..., :1], 'float': PHOTO / np.float32(127.5) - 1}


@pytest.mark.parametrize('kind', IMAGES)
@pytest.mark.parametrize('make', [augment.RandAugment, lambda: augment.RandomErasing(1.0)])
def test_augmentations_change_images_and_keep_their_type(make, kind):
  image = IMAGES[kind]
  changed = 0
  for seed in range(40):
    first, again = (make()(image, np.random.default_rng(seed), 32) for _ in range(2))
    assert first.shape == image.shape and first.dtype == image.dtype
    np.testing.assert_array_equal(first, again)
    changed += not np.array_equal(first, image)
  assert changed > 30


def test_cutmix_weighs_labels_by_area():
  ones = np.ones((16, 16, 1), np.float32)
  for seed in range(20):
    image, weight = augment.CutMix().mix(ones, -ones, np.random.default_rng(seed))
    np.testing.assert_allclose((image.mean() + 1) / 2, weight, atol=1e-6)


@pytest.fixture(scope='module')
def npz(tmp_path_factory):
  """Seven images of one level each, which is their label."""
  path = tmp_path_factory.mktemp('levels') / 'levels.npz'
  label = np.arange(7)
  image = np.broadcast_to(label[:, None, None, None] * 40, (7, 6, 6, 2)).astype(np.uint8)
  np.savez(path, image=image, label=label, split=['train'] * 7)
  return path


def config(npz, **kwargs):
  settings = {'batch_size': 6, 'seed': 3, **kwargs}
  return DatasetConfig(f'npz:{npz}', {'image': 6, 'label': 1}, 'train', **settings)


def test_mixed_images_have_the_labels_of_both_on_any_number_of_hosts(npz):
  """Pairs are mixed of positions, also where a batch ends between them."""
  iterator = get_dataset(config(npz, batch_size=5, augmentations=('mixup',), num_epochs=2))
  rows = []
  for batch in iterator:
    for name, spec in iterator.element_spec.items():
      assert (batch[name].shape, batch[name].dtype) == (spec.shape, spec.dtype), name
    level = (batch['label'] * batch['label_weight']).sum(1) * 40 * 2 / 255 - 1
    real = batch['mask'] == 1
    np.testing.assert_allclose(batch['label_weight'].sum(1)[real], 1, rtol=1e-6)
    np.testing.assert_allclose(batch['image'][real, 0, 0, 0], level[real], atol=1e-5)
    rows += [{name: x[i] for name, x in batch.items()} for i in range(5)]
  assert [row['mask'] for row in rows] == [1] * 14 + [0]
  np.testing.assert_array_equal(rows[2]['label'][::-1], rows[3]['label'])
  part = get_dataset(config(npz, batch_size=5, augmentations=('mixup',), num_epochs=2), rows=[3, 1])
  for batch, start in zip(part, (0, 5, 10), strict=True):
    for name, x in batch.items():
      for i, row in enumerate((3, 1)):
        np.testing.assert_array_equal(x[i], rows[start + row][name], err_msg=name)


def test_arrays_are_augmented_by_name_in_training_only(npz):
  plain = next(get_dataset(config(npz)))
  moved = next(get_dataset(config(npz, augmentations=('pad_crop', augment.RandomErasing(1.0)))))
  np.testing.assert_array_equal(moved['label'], plain['label'])
  assert 'label_weight' not in moved
  assert all(np.ptp(image) > 0 for image in moved['image']) and np.ptp(plain['image'][0]) == 0
  evaluated = next(get_dataset(config(npz, augmentations=('pad_crop',), augment=False)))
  np.testing.assert_array_equal(evaluated['image'], plain['image'])


def test_small_images_are_not_cropped_like_photographs(tmp_path, image_files):
  image_files.write(tmp_path / 'a', 3)  # of 20 x 30 pixels
  task = tasks.get_task(f'image_folder:{tmp_path}')
  assert [type(x).__name__ for x in task.preprocessors] == ['PadCrop', 'Flip']


def test_wrong_augmentations(npz):
  for wrong, message in {
    ('mixup', 'cutmix'): r"\('mixup', 'cutmix'\)",
    ('blur',): r"\('blur',\); .*'pad_crop'",
    'flip': "augmentations is 'flip'; ",
    ('flip', augment.Mixup): r'such as @RandAugment\(\)',  # without parentheses, the class
  }.items():
    with pytest.raises(ValueError, match=message):
      get_dataset(config(npz, augmentations=wrong))
  with pytest.raises(
    ValueError, match=r"'flip',\), but 'train\[:90%\]' is a part of .*augment = True"
  ):
    get_dataset(dataclasses.replace(config(npz, augmentations=('flip',)), split='train[:90%]'))
  with pytest.raises(ValueError, match=r"augmentations is \['mixup'\]; captions"):
    get_dataset(
      DatasetConfig('glyph_names', {'image': 8, 'text': 8}, 'train', 2, augmentations=['mixup'])
    )
  with pytest.raises(ValueError, match='RandAugment .* has 2'):
    next(get_dataset(config(npz, augmentations=('randaugment',))))
  with pytest.raises(ValueError, match='CutMix.alpha=0 must be above 0'):
    augment.CutMix(0)
