"""Images per second of CPU time from JPEG files to representations, compared with timm,
transformers and open_clip with the same parameters and each with its own way to the pixels.

    pip install torch timm transformers open_clip_torch    # not needed by the project
    python -m benchmarks.towers [--json OUT] [--towers ViT-S/16,ViT-B/16,ConvNeXt-T --batches 1,32]

All run on one core, or on --cores, on photographs of 500 x 375 pixels. The others compute in
float32, and ours in --dtype. Ours opens the file that the other project writes, as
`het_plugin.represent` does. All take turns, and the median of --turns counts. What is not installed
is left out; without any of them ours runs alone.
"""

import dataclasses
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import traverse_util
from PIL import Image

from benchmarks.command_line import integers, make_parser, names, report
from benchmarks.integrator import time_in_turns
from het_plugin import runs
from het_plugin.backbones import vit

Represent = Callable[[Sequence[Path]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Size:
  """A tower in the words of each project."""

  timm: str
  width: int = 0  # of a ViT with 12 blocks
  patch_size: int = 16
  transformers: str = 'ViT'


SIZES = {
  'ViT-S/16': Size('vit_small_patch16_224', 384),
  'ViT-B/16': Size('vit_base_patch16_224', 768),
  'DINOv3-S': Size('vit_small_patch16_dinov3', 384, transformers='DINOv3ViT'),
  'ConvNeXt-T': Size('convnext_tiny', transformers='ConvNext'),
  'test': Size('test_vit', 64, 112),
}


def in_timm(size: Size, batch: int, photos: Path, folder: Path) -> Represent:
  """Writes the model to `folder`; its loader and the model, as timm's validation runs them."""
  import timm
  import torch

  model = timm.create_model(size.timm, num_classes=0).eval()
  timm.models.save_for_hf(model, folder, safe_serialization=True)
  settings = timm.data.resolve_model_data_config(model)
  loader = timm.data.create_loader(
    timm.data.create_dataset('', photos / 'train'),
    batch_size=batch,
    use_prefetcher=False,
    num_workers=0,
    persistent_workers=False,
    **settings,
  )

  def represent(files):
    with torch.inference_mode():
      return np.concatenate([model(pixels).numpy() for pixels, _ in loader])

  return represent


def in_transformers(size: Size, batch: int, photos: Path, folder: Path) -> Represent:
  import torch
  import transformers

  of_vit = {
    'hidden_size': size.width,
    'num_attention_heads': size.width // 64,
    'intermediate_size': 4 * size.width,
    'patch_size': size.patch_size,
  }
  side = {'shortest_edge': 224} if not size.width else {'height': 224, 'width': 224}
  config = getattr(transformers, f'{size.transformers}Config')(**of_vit if size.width else {})
  plain = {'add_pooling_layer': False} if size.transformers == 'ViT' else {}
  model = getattr(transformers, f'{size.transformers}Model')(config, **plain).eval()
  processor = getattr(transformers, f'{size.transformers}ImageProcessor')(size=side)
  model.save_pretrained(folder)
  processor.save_pretrained(folder)

  def of_batch(files):
    images = [Image.open(file).convert('RGB') for file in files]
    found = model(**processor(images, return_tensors='pt'))
    return (found.last_hidden_state[:, 0] if plain else found.pooler_output).numpy()

  def represent(files):
    with torch.inference_mode():
      return np.concatenate(
        [of_batch(files[start : start + batch]) for start in range(0, len(files), batch)]
      )

  return represent


def in_open_clip(size: Size, batch: int, photos: Path, folder: Path) -> Represent:
  import open_clip
  import safetensors.torch
  import torch

  image = {'layers': 12, 'width': size.width, 'patch_size': size.patch_size, 'image_size': 224}
  text = {'context_length': 9, 'vocab_size': 99, 'width': 64, 'heads': 1, 'layers': 1}
  settings = {'embed_dim': 64, 'vision_cfg': image, 'text_cfg': text}
  model = open_clip.CLIP(**settings).eval()
  safetensors.torch.save_file(model.state_dict(), folder / 'open_clip_model.safetensors')
  (folder / 'open_clip_config.json').write_text(json.dumps({'model_cfg': settings}))
  transform = open_clip.transform.image_transform_v2(
    open_clip.transform.PreprocessCfg(), is_train=False
  )

  def of_batch(files):
    pixels = torch.stack([transform(Image.open(file)) for file in files])
    return model.encode_image(pixels).numpy()

  def represent(files):
    with torch.inference_mode():
      return np.concatenate(
        [of_batch(files[start : start + batch]) for start in range(0, len(files), batch)]
      )

  return represent


def alone(size: Size, folder: Path) -> list[str]:
  """Writes a model of ours to `folder`; its gin bindings."""
  settings = {'width': size.width, 'depth': 1, 'mlp_dim': 64, 'num_heads': 1}
  model = vit(f'S/{size.patch_size}', **settings)
  params = model.init(jax.random.key(0), np.zeros((1, 224, 224, 3), np.float32))['params']
  arrays = traverse_util.flatten_dict({'backbone': params}, sep='/')
  head = {
    'head/kernel': np.zeros((size.width, 1), np.float32),
    'head/bias': np.zeros(1, np.float32),
  }
  np.savez(folder / 'model.npz', **arrays, **head)
  bound = [f'vit.{name} = {value}' for name, value in settings.items()]
  return ['BACKBONE = @vit()', f"vit.variant = 'S/{size.patch_size}'", *bound]


PEERS = {'timm': in_timm, 'transformers': in_transformers, 'open_clip': in_open_clip}


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--towers', type=names(SIZES), default=[x for x in SIZES if x != 'test'])
  parser.add_argument('--peers', type=names(PEERS), default=list(PEERS))
  parser.add_argument('--batches', type=integers, default=[1, 32])
  parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default='float32', help='of ours')
  parser.add_argument('--images', type=int, default=32)
  parser.add_argument('--turns', type=int, default=3)
  parser.add_argument('--cores', type=int, default=1)
  args = parser.parse_args()
  cores = sorted(os.sched_getaffinity(0))[: args.cores]
  os.sched_setaffinity(0, cores)  # before jax counts them
  peers = [name for name in args.peers if importlib.util.find_spec(name)]
  if peers:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(args.cores)
  with tempfile.TemporaryDirectory() as root:
    photos = write_photographs(Path(root) / 'photos', args.images)
    report(
      args.json,
      [
        compare(args, tower, batch, peer, photos)
        for tower in args.towers
        for peer in peers or [None]
        for batch in args.batches
        if not (peer == 'open_clip' and SIZES[tower].transformers != 'ViT')
      ],
    )


def write_photographs(folder: Path, count: int) -> Path:
  """JPEG files of smooth noise, as large as photographs of this size are, in one class."""
  rng = np.random.default_rng(0)
  where = folder / 'train' / 'class'
  where.mkdir(parents=True)
  for i in range(count):
    small = Image.fromarray(rng.integers(0, 256, (75, 100, 3), np.uint8))
    large = small.resize((500, 375), Image.Resampling.BICUBIC)
    large.save(where / f'{i:04}.jpg', quality=90)
  return folder


def compare(args, tower, batch, peer, photos):
  files = sorted(photos.glob('*/*/*'))
  with tempfile.TemporaryDirectory() as root:
    folder = Path(root)
    bindings = []
    functions = []
    if peer is None:
      bindings = alone(SIZES[tower], folder)
    else:
      theirs = PEERS[peer](SIZES[tower], batch, photos, folder)
      functions = [lambda: theirs(files)]
    found = [*folder.glob('*model.safetensors'), *folder.glob('model.npz')]
    backbone = 'vit' if SIZES[tower].width else 'convnext'
    bindings.append(f'{backbone}.dtype = {args.dtype!r}')
    run = runs.open_run(str(found[0]), bindings=bindings)

    def ours():
      rows = run.rows('train', task=f'image_folder:{photos}', batch_size=batch)
      return rows.features

    functions = [ours, *functions]
    outputs = [np.asarray(function()) for function in functions]  # compiles, too
    seconds = time_in_turns(functions, (), args.turns, time.process_time)
    rates = [len(files) / x for x in seconds]
  row = {'tower': tower, 'peer': peer, 'batch': batch, 'ours_images_per_second': rates[0]}
  if peer is None:
    return row | {'theirs_images_per_second': None, 'ratio': None, 'min_cosine': None}
  cosines = cosine(*outputs)
  return row | {
    'theirs_images_per_second': rates[1],
    'ratio': rates[0] / rates[1],
    'min_cosine': float(cosines.min()),
  }


def cosine(x, y):
  """Of each row [N, D]."""
  return (x * y).sum(axis=1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)


if __name__ == '__main__':
  main()
