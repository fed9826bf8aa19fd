"""Pixels of published towers: as the libraries make them where they are installed, and as Pillow
makes them without.
"""

import json
import logging

import numpy as np
import pytest
from PIL import Image

from het_plugin import data, runs, weights
from het_plugin.data import preprocess
from het_plugin.weights import pixels
from tests.weights.test_towers import clip_arrays

SIZES = ((375, 500), (500, 31), (20, 13), (48, 48))  # height, width
TIMM = {
  'bicubic, 0.9': {'crop_pct': 0.9, 'interpolation': 'bicubic', 'input_size': (3, 48, 48)},
  'squash': {'crop_mode': 'squash', 'crop_pct': 1.0, 'input_size': (3, 40, 40)},
  'squash, 0.95': {'crop_mode': 'squash', 'crop_pct': 0.95, 'interpolation': 'bilinear'},
  'border': {'crop_mode': 'border', 'crop_pct': 1.0, 'input_size': (3, 47, 47)},
  'border, 0.9': {'crop_mode': 'border', 'crop_pct': 0.9, 'interpolation': 'lanczos'},
  'usual': {'input_size': (3, 224, 224)},
}
OPEN_CLIP = {
  'CLIP': {},
  'SigLIP': {'resize_mode': 'squash', 'mean': [0.5] * 3, 'std': [0.5] * 3},
  'longest': {'resize_mode': 'longest', 'interpolation': 'bilinear', 'fill_color': 9},
}
TRANSFORMERS = {
  'ViT': {'size': 48},
  'DeiT': {'size': 61, 'crop_size': 48},
  'Beit': {'size': {'height': 48, 'width': 48}},
  'CLIP': {'size': 48, 'crop_size': 48},
  'Bit': {'size': {'shortest_edge': 63}, 'crop_size': 48},
  'Siglip': {'size': {'height': 48, 'width': 48}},
  'ConvNext': {'size': 48, 'crop_pct': 0.9},
  'ConvNext, large': {'size': 384},
  'DINOv3ViT': {'size': 48},
  'Tipsv2': {'size': {'height': 48, 'width': 48}},
  'Gemma3': {'size': {'height': 48, 'width': 48}},
  'GotOcr2': {'size': {'height': 48, 'width': 48}},
  'Llava': {'size': {'shortest_edge': 60}, 'crop_size': {'height': 48, 'width': 48}},
}


def photo(height, width):
  """A picture with edges, a gradient and noise, uint8 [h, w, 3]."""
  rng = np.random.default_rng(0)
  ramp = np.linspace(0, 200, height)[:, None, None] + np.linspace(0, 55, width)[:, None]
  blocks = np.kron(rng.integers(0, 2, (-(-height // 7), -(-width // 5), 3)), np.ones((7, 5, 1)))
  return (
    0.5 * ramp + 90 * blocks[:height, :width] + rng.uniform(0, 37, (height, width, 1))
  ).astype(np.uint8)


def made(found, image):
  recipe = preprocess.ResizeAndCrop(**{x: found[x] for x in pixels.FIELDS if x in found})
  return recipe(image, np.random.default_rng(0), found['size'])


def normalised(found, image):
  return (made(found, image) / 255 - found['image_mean']) / found['image_std']


def largest_difference(found, theirs):
  """In levels, of pictures of all sizes; `theirs` gives normalised pixels [C, H, W]."""
  difference = 0
  for size in SIZES:
    image = photo(*size)
    expected = np.asarray(theirs(Image.fromarray(image))).transpose(1, 2, 0)
    ours = normalised(found, image)
    assert ours.shape == expected.shape
    difference = max(
      difference, (255 * np.asarray(found['image_std']) * np.abs(ours - expected)).max()
    )
  print(f'the largest difference: {difference:.2g} levels')
  return difference


@pytest.mark.parametrize('name', TIMM)
def test_pixels_of_timm(name):
  timm_data = pytest.importorskip('timm').data
  config = {'architecture': 'any', 'pretrained_cfg': TIMM[name]}
  settings = timm_data.resolve_data_config(pretrained_cfg=TIMM[name])
  found = pixels.read({pixels.CONFIG: config})
  assert largest_difference(found, timm_data.create_transform(**settings)) < 1e-3


@pytest.mark.parametrize('name', OPEN_CLIP)
def test_pixels_of_open_clip(name):
  transform = pytest.importorskip('open_clip').transform
  settings = {'size': 48, **OPEN_CLIP[name]}
  config = {'model_cfg': {'vision_cfg': {'image_size': 48}}, 'preprocess_cfg': OPEN_CLIP[name]}
  found = pixels.read({pixels.OPEN_CLIP: config})
  theirs = transform.image_transform_v2(transform.PreprocessCfg(**settings), is_train=False)
  assert largest_difference(found, theirs) < 1e-3


@pytest.mark.parametrize('backend', ['', 'Pil'])
@pytest.mark.parametrize('name', TRANSFORMERS)
def test_pixels_of_transformers(name, backend):
  transformers = pytest.importorskip('transformers')
  kind = f'{name.partition(",")[0]}ImageProcessor'
  if not hasattr(transformers, kind + backend):
    pytest.skip('transformers has no such processor')
  processor = getattr(transformers, kind + backend)(**TRANSFORMERS[name])
  for described in (
    {pixels.PREPROCESSOR: {'image_processor_type': kind, **TRANSFORMERS[name]}},
    {pixels.PROCESSOR: {'image_processor': processor.to_dict()}},
  ):
    found = pixels.read(described)
    difference = largest_difference(found, lambda x: processor(x)['pixel_values'][0])
    # torchvision's resize of tensors rounds otherwise; DINOv3's does not round.
    assert difference < (1e-3 if backend else 2.01)


CLIP = {'image_processor_type': 'CLIPImageProcessorFast', 'size': 11, 'crop_size': 8, 'resample': 3}


def test_pixels_are_those_of_pillow():
  """The recipes of timm and transformers, each by Pillow alone."""
  image = photo(20, 31)
  picture = Image.fromarray(image)
  timm = {'architecture': 'any', 'pretrained_cfg': {'input_size': [3, 8, 8], 'crop_pct': 0.9}}
  found = pixels.read({pixels.CONFIG: timm})
  expected = picture.resize((12, 8), Image.Resampling.BICUBIC).crop((2, 0, 10, 8))
  np.testing.assert_array_equal(made(found, image), expected)
  found = pixels.read({pixels.PREPROCESSOR: CLIP, pixels.CONFIG: {}})
  expected = picture.resize((17, 11), Image.Resampling.BICUBIC).crop((4, 1, 12, 9))
  np.testing.assert_array_equal(made(found, image), expected)
  timm['pretrained_cfg'] |= {'crop_mode': 'border', 'mean': [0.2] * 3, 'crop_pct': 1.0}
  found = pixels.read({pixels.CONFIG: timm, pixels.PREPROCESSOR: CLIP})
  image = made(found, image)
  np.testing.assert_array_equal(image[[0, -1]], np.full((2, 8, 3), 51))
  expected = picture.resize((8, 5), Image.Resampling.BICUBIC)
  np.testing.assert_array_equal(image[1:6], expected)
  levels = made(found, preprocess.to_levels(np.asarray(picture)))  # of an array of floats
  np.testing.assert_allclose(levels, preprocess.to_levels(image), atol=0.02)


def test_a_very_narrow_photograph_needs_little_memory(monkeypatch):
  recipe = preprocess.ResizeAndCrop(crop_fraction=0.9)
  image = photo(21, 500)
  whole = recipe(image, np.random.default_rng(0), 8)
  monkeypatch.setattr(preprocess, '_LARGEST', 0)
  np.testing.assert_allclose(recipe(image, np.random.default_rng(0), 8).astype(int), whole, atol=1)


@pytest.mark.parametrize(
  'name, settings, sentence',
  [
    (pixels.PREPROCESSOR, {'image_processor_type': 'SamImageProcessor'}, 'SamImageProcessor.*CLIP'),
    (pixels.PREPROCESSOR, CLIP | {'do_center_crop': False}, 'do_center_crop=False .* no squares'),
    (pixels.PREPROCESSOR, CLIP | {'do_rescale': False}, 'do_rescale=False .* must be True'),
    (pixels.PREPROCESSOR, CLIP | {'rescale_factor': 1.0}, 'rescale_factor=1.0 .* must be 1 / 255'),
    (pixels.PREPROCESSOR, CLIP | {'crop_to_patches': True}, 'crop_to_patches=True .* be read'),
    (pixels.PREPROCESSOR, CLIP | {'do_pad': True}, 'do_pad=True .* cannot be read'),
    (pixels.PREPROCESSOR, CLIP | {'crop_size': 12}, 'crop_size=12 .* at most its size, 11'),
    (pixels.PREPROCESSOR, CLIP | {'size': {'longest_edge': 9}}, "size={'longest_edge': 9} .* squ"),
    (pixels.CONFIG, {'architecture': 'a', 'crop_mode': 'pad'}, "crop_mode='pad' .* one of center"),
    (pixels.CONFIG, {'architecture': 'a', 'interpolation': 'x'}, "interpolation='x' .* one of "),
    (pixels.CONFIG, {'architecture': 'a', 'crop_pct': 1.1}, r'crop_pct=1.1 .* in \(0, 1\]'),
    (pixels.CONFIG, {'architecture': 'a', 'input_size': [3, 8, 9]}, 'input_size.* a square'),
  ],
)
def test_recipes_that_cannot_be_followed_are_named(name, settings, sentence):
  with pytest.raises(ValueError, match=sentence):
    pixels.read({name: settings})


def test_a_run_of_a_published_file_reads_photographs_by_its_recipe(tmp_path, caplog):
  caplog.set_level(logging.INFO)
  path = tmp_path / 'model.safetensors'
  weights.write_arrays(path, clip_arrays())
  heads = {'num_attention_heads': 2}
  config = {'model_type': 'clip', 'text_config': heads, 'vision_config': heads}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'preprocessor_config.json').write_text(json.dumps(CLIP))
  (tmp_path / 'photos' / 'a').mkdir(parents=True)
  image = photo(80, 131)
  Image.fromarray(image).save(tmp_path / 'photos' / 'a' / '1.png')
  task = f'image_folder:{tmp_path / "photos"}'

  def first_image(run):
    with run.open_split('train', task=task, batch_size=8) as (batches, _):
      return next(batches)['image'][0]

  run = runs.open_run(path)
  assert (run.image_size, run.resize.filter) == (8, 'bicubic')
  assert "Pixels as in preprocessor_config.json: size=8, mode='shortest', crop_f" in caplog.text
  found = pixels.read({pixels.PREPROCESSOR: CLIP})
  np.testing.assert_array_equal(first_image(run), preprocess.to_levels(made(found, image)))
  assert run.config.describe()['resize']['crop_fraction'] == pytest.approx(8 / 11)
  nearest = runs.open_run(path, bindings=["ResizeAndCrop.filter = 'nearest'"])
  assert np.isin(preprocess.to_levels(image), first_image(nearest)).any()
  assert not np.array_equal(first_image(nearest), first_image(run))
  usual = first_image(runs.open_run(path, bindings=['DatasetConfig.resize = None']))
  config = data.one_pass(task, 'train', image_size=8, max_labels=1, batch_size=1, bounded=False)
  np.testing.assert_array_equal(usual, next(data.get_dataset(config))['image'][0])
