"""NaFlex: pictures of any aspect, as transformers and timm read them where they are installed, and
as a ViT reads one rectangular picture alone.
"""

import json

import jax
import numpy as np
import pytest
from PIL import Image

from het_plugin import data, runs, weights
from het_plugin.backbones import ViT, naflex
from het_plugin.commands import export
from het_plugin.data import preprocess
from tests.weights.test_pixels import photo
from tests.weights.test_towers import siglip_arrays

SIZES = ((60, 240), (240, 61), (100, 130), (30, 400), (64, 64))  # height, width
MODEL = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4}
MODEL |= {'intermediate_size': 48, 'num_patches': 25, 'patch_size': 8}
TIMM = {'gap': 30, 'par_gap': 30, 'parfac_gap': 30, 'map': 30, 'siglip': 36}


def randomise(torch, model):
  torch.manual_seed(0)
  with torch.no_grad():
    for p in model.parameters():
      p.add_(0.2 * torch.randn_like(p))


def represented(folder, file='model.safetensors'):
  """Our features of the pictures, in the order of SIZES, and the pictures."""
  photos = folder / 'photos' / 'train' / 'a'
  photos.mkdir(parents=True)
  pictures = [Image.fromarray(photo(*size)) for size in SIZES]
  for i, picture in enumerate(pictures):
    picture.save(photos / f'{i}.png')
  run = runs.open_run(folder / file)
  return run.rows('train', task=f'image_folder:{folder / "photos"}', batch_size=8), pictures


@pytest.mark.parametrize('kind', ['VisionModel', 'Model', 'ForImageClassification'])
def test_parity_with_transformers(kind, tmp_path):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  config = transformers.Siglip2VisionConfig(**MODEL)
  if kind != 'VisionModel':
    text = {x: MODEL[x] for x in MODEL if x not in ('num_patches', 'patch_size')}
    text |= {'vocab_size': 30, 'max_position_embeddings': 7, 'projection_size': 32}
    config = transformers.Siglip2Config(vision_config=config.to_dict(), text_config=text)
  model = getattr(transformers, f'Siglip2{kind}')(config).eval()
  randomise(torch, model)
  model.save_pretrained(tmp_path)
  processor = transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=30)
  processor.save_pretrained(tmp_path)
  rows, pictures = represented(tmp_path)
  inputs = processor(pictures, return_tensors='pt')
  with torch.no_grad():
    if kind == 'ForImageClassification':
      hidden = model.vision_model(**inputs).last_hidden_state
      counts = inputs['pixel_attention_mask'][..., None]
      expected = (hidden * counts).sum(1) / counts.sum(1)
    else:
      expected = getattr(model, 'vision_model', model)(**inputs).pooler_output
  np.testing.assert_allclose(rows.features, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize('name', TIMM)
def test_parity_with_timm(name, tmp_path):
  timm = pytest.importorskip('timm')
  torch = pytest.importorskip('torch')
  settings = {'embed_dim': 32, 'depth': 2, 'num_heads': 4, 'pos_embed_grid_size': (5, 5)}
  model = timm.create_model(f'naflexvit_base_patch16_{name}', num_classes=0, **settings).eval()
  randomise(torch, model)
  folder = tmp_path
  timm.models.save_for_hf(model, folder, model_args=settings, safe_serialization=True)
  config = json.loads((folder / 'config.json').read_text())
  config['pretrained_cfg']['input_size'] = [3, 96, 96]
  (folder / 'config.json').write_text(json.dumps(config))
  rows, pictures = represented(folder)
  transform = timm.data.create_transform(
    **timm.data.resolve_model_data_config(model) | {'input_size': (3, 96, 96)},
    naflex=True,
    patchify=True,
    patch_size=16,
    max_seq_len=36,
  )
  collated = timm.data.naflex_dataset.NaFlexCollator(36)([(transform(x), 0) for x in pictures])[0]
  with torch.no_grad():
    expected = model(collated).numpy()
  np.testing.assert_allclose(rows.features, expected, atol=1e-5)


def arrays_of(tower, seed=0):
  image = np.zeros((1, 24, 24, 3), np.float32)
  params = jax.eval_shape(tower.init, jax.random.key(0), image)['params']
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: 0.3 * rng.normal(size=x.shape).astype(np.float32), params)


@pytest.mark.parametrize('pooling', ['map', 'all', 'token_and_gap'])
def test_a_picture_in_a_batch_is_as_one_alone(pooling):
  settings = {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 24, 'num_heads': 2}
  alone = ViT(**settings, pooling=pooling, stored_grid=5)
  tower = alone.clone(naflex='bilinear_antialias')
  params = {'params': arrays_of(alone)}
  recipe = preprocess.ResizeAndCrop('patches', patch_size=4, max_patches=23)
  pictures = [photo(4 * rows, 4 * columns) for rows, columns in ((3, 7), (11, 2))]
  levels = [preprocess.to_levels(x) for x in pictures]
  sheets = np.stack([recipe(x, np.random.default_rng(0), 24) for x in levels])
  recipe.check(24)
  phi, layers = jax.jit(tower.apply)(params, sheets)
  for i, x in enumerate(levels):
    expected, theirs = jax.jit(alone.apply)(params, x[None])
    np.testing.assert_allclose(phi[i], expected[0], atol=2e-5)
    for name in ('patches', 'block00', 'encoder_norm'):
      np.testing.assert_allclose(layers[name][i], theirs[name].mean((0, 1)), atol=2e-5)
  others = np.full((3, 24, 24, 3), -1, np.float32)  # a row that fills up a batch, and no sheets
  others[1] = 0.3
  others[2, :-1] = 0.3
  is_nan = np.isnan(jax.jit(tower.apply)(params, others)[0])
  assert not is_nan[0].any() and is_nan[1:].all()


@pytest.mark.parametrize('filter', ['bilinear', 'bicubic'])
def test_positions_are_those_of_jax(filter):
  table = np.random.default_rng(0).normal(size=(7, 7, 3)).astype(np.float32)
  grid = np.array([[3, 8], [7, 7], [1, 24], [5, 2]], np.int32)
  made = naflex.positions(table, grid, 49, f'{filter}_antialias', square=False)
  for (rows, columns), x in zip(grid, made, strict=True):
    expected = jax.image.resize(table, (rows, columns, 3), filter).reshape(-1, 3)
    np.testing.assert_allclose(x[: rows * columns], expected, atol=1e-5)
  square = naflex.positions(table, grid, 49, f'{filter}_antialias', square=True)[3]
  expected = jax.image.resize(table, (5, 5, 3), filter)[:, :2].reshape(-1, 3)
  np.testing.assert_allclose(square[:10], expected, atol=1e-5)


def test_grids_are_as_large_as_they_may_be():
  made = {x: preprocess.patch_grid(*x, 16, 256) for x in ((480, 640), (1, 5000), (224, 224))}
  assert made == {(480, 640): (14, 18), (1, 5000): (1, 256), (224, 224): (16, 16)}


@pytest.mark.parametrize('augmentations', [None, ('inception', 'flip')])
def test_crops_of_training_keep_their_aspect(augmentations, tmp_path):
  folder = tmp_path / 'train' / 'a'
  folder.mkdir(parents=True)
  for i in range(8):
    Image.fromarray(photo(100, 130)).save(folder / f'{i}.png')
  lengths = {'image': 48, 'label': 1}
  recipe = preprocess.ResizeAndCrop('patches', patch_size=8, max_patches=25)
  config = data.DatasetConfig(
    f'image_folder:{tmp_path}', lengths, 'train', 8, resize=recipe, augmentations=augmentations
  )
  levels = np.rint((next(data.get_dataset(config))['image'] + 1) * 127.5)
  grids = levels[:, -1, -4:, 0]  # rows, then columns, each in two levels
  assert not grids[:, [0, 2]].any() and len({tuple(x) for x in grids}) > 1
  assert (grids[:, 1] * grids[:, 3] <= 25).all()


@pytest.fixture
def siglip_file(tmp_path):
  """A SigLIP 2 with patches of 7 pixels in the names of transformers, without a description."""
  arrays = siglip_arrays('transformers')
  name = 'vision_model.embeddings.patch_embedding.weight'
  arrays[name] = arrays[name].transpose(0, 2, 3, 1).reshape(32, -1)
  path = tmp_path / 'model.safetensors'
  weights.write_arrays(path, arrays)
  return path


def test_a_published_file_reads_photographs_and_arrays(siglip_file):
  run = runs.open_run(siglip_file, bindings=['ResizeAndCrop.max_patches = 12', 'IMAGE_SIZE = 35'])
  images = np.stack([photo(35, 21)] * 8)
  path = siglip_file.parent / 'images.npz'
  np.savez(path, image=images, label=np.zeros(8, int))
  features = run.rows('train', task=f'npz:{path}', batch_size=8).features
  settings = {x: y for x, y in run.model.backbone.__dict__.items() if x in ViT.__annotations__}
  alone = ViT(**settings | {'naflex': None})
  picture = Image.fromarray(images[0]).resize((21, 28), Image.Resampling.BILINEAR)
  image = preprocess.to_levels(np.asarray(picture))[None]
  expected, _ = alone.apply({'params': run.params['backbone']}, image)
  np.testing.assert_allclose(features, np.repeat(expected, len(features), axis=0), atol=1e-5)
  with pytest.raises(ValueError, match=r"resize='aspect' makes squares, and .* \(NaFlex\)"):
    run.rows('train', task=f'npz:{path}', batch_size=8, resize='aspect')
  for last_row in (0.3, -1):
    squares = np.full((2, 35, 35, 3), 0.3, np.float32)
    squares[:, -1] = last_row
    with pytest.raises(ValueError, match=r"batch\['image'\]\[0\] is no sheet of patches"):
      run.represent({'image': squares})
  with pytest.raises(ValueError, match='a program takes squares: use predict'):
    export.export(run, str(siglip_file.parent / 'program'), 'stablehlo')
  with pytest.raises(ValueError, match='published files have no names: keep the run'):
    run.config.published_params()


@pytest.mark.parametrize(
  'binding,message',
  [
    ('DatasetConfig.resize = None', 'resize=None makes squares, and .* pictures of any aspect'),
    ('ResizeAndCrop.patch_size = 5', 'patch_size=5 must be 7, as in .*safetensors'),
  ],
)
def test_images_of_another_kind_end_the_opening(siglip_file, binding, message):
  with pytest.raises(ValueError, match=message):
    runs.open_run(siglip_file, bindings=[binding])


def test_what_does_not_fit_is_refused():
  with pytest.raises(ValueError, match=r"ViT.naflex='bilinear' needs .* 'rope' and 5"):
    ViT(4, 16, 1, 24, 2, naflex='bilinear', stored_grid=5, position='rope')
  recipe = preprocess.ResizeAndCrop('patches')
  with pytest.raises(ValueError, match='image_size=256 must be 272 for .*max_patches=256'):
    recipe.check(256)


@pytest.mark.parametrize(
  'shape, config, sentence',
  [
    ((4, 4), {}, r'is a NaFlex ViT of timm, .* put its config.json beside it'),
    ((4, 9), {'naflex': 'bilinear'}, r'a table of 4 x 9 patches, which must be a square'),
  ],
)
def test_positions_of_timm_that_cannot_be_read(shape, config, sentence):
  arrays = siglip_arrays('timm')
  kernel = arrays.pop('patch_embed.proj.weight')
  arrays['embeds.proj.weight'] = kernel.reshape(32, -1)
  arrays['embeds.proj.bias'] = arrays.pop('patch_embed.proj.bias')
  arrays.pop('pos_embed')
  arrays['embeds.pos_embed_y'] = np.zeros((1, shape[0], 32), np.float32)
  arrays['embeds.pos_embed_x'] = np.zeros((1, shape[1], 32), np.float32)
  with pytest.raises(ValueError, match=sentence):
    weights.read_tower(arrays, config)


def test_a_description_of_squares_is_refused(siglip_file):
  described = {'image_processor_type': 'ViTImageProcessor', 'size': 28}
  (siglip_file.parent / 'preprocessor_config.json').write_text(json.dumps(described))
  with pytest.raises(ValueError, match=r'preprocessor_config.json makes squares, .* \(NaFlex\)'):
    runs.open_run(siglip_file)
