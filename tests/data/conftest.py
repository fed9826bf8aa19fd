import json

import numpy as np
import pytest
from PIL import Image


class ImageFiles:
  """Writes small image folders."""

  @staticmethod
  def write(folder, count, suffix='.png', seed=0):
    """Writes `count` RGB images of different sizes; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    paths = [folder / f'{i:03}{suffix}' for i in range(count)]
    for i, path in enumerate(paths):
      Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), np.uint8)).save(path)
    return paths

  @staticmethod
  def truncate(path):
    """Cuts an image file off in the middle."""
    encoded = path.read_bytes()
    path.write_bytes(encoded[: len(encoded) // 2])


@pytest.fixture(scope='session')
def image_files():
  return ImageFiles


@pytest.fixture(scope='session')
def photos(tmp_path_factory):
  """21 + 9 photographs of three classes with two captions each; one has none, one is cut off."""
  root = tmp_path_factory.mktemp('photos')
  for seed, name in enumerate('abc'):
    ImageFiles.write(root / 'train' / name, 7, '.jpg', seed)
    ImageFiles.write(root / 'validation' / name, 3, '.png', seed + 10)
  ImageFiles.truncate(root / 'train' / 'b' / '002.jpg')
  files = sorted(path.relative_to(root) for path in root.glob('*/*/*'))
  records = [
    {'file': str(file), 'split': file.parts[0], 'caption': [f'photo {file.stem}', file.parts[1]]}
    for file in files
  ]
  records[3]['caption'] = ''
  (root / 'captions.jsonl').write_text('\n'.join(map(json.dumps, records)))
  return root


@pytest.fixture(scope='session')
def sentencepiece_model(tmp_path_factory):
  """Path of a SentencePiece model of 60 tokens, made of glyph names."""
  import sentencepiece

  from het_plugin.data import glyph_bank

  path = tmp_path_factory.mktemp('vocabulary') / 'names.model'
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=(name.lower() for name in glyph_bank.glyph_classes('core').names),
    model_prefix=str(path.with_suffix('')),
    vocab_size=60,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
  )
  return str(path)
