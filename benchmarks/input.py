"""How fast JPEG files are read, cropped at random and mirrored, compared with tf.data.

    python -m benchmarks.input [--json OUT]
    python -m benchmarks.input --files=64 --size=48 --image_size=16 --batch=8 --turn=64 --workers=1

Makes JPEG files with the spectrum of photographs, an image folder and the same files as a TFDS data
set. Reads them with our pipeline and, in turns, with tf.data: read, decode, random crop of 5% to
100% of the area, antialiased resize, flip, levels in [-1, 1], batches. theirs_without_antialias
gives other pixels.

`workers` is num_threads here, and the private thread pool and the parallel calls of tf.data there.
tf.data also works in threads of the process, one per core, so `workers` is in addition the number
of cores that either side may use. Rates per second of CPU time count all threads: they show what an
image costs, also on a busy machine.
"""

import collections
import itertools
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

from benchmarks.command_line import integers, make_parser, report
from het_plugin.data import DatasetConfig, get_dataset, pipeline

NUM_CLASSES = 4
CORES = sorted(os.sched_getaffinity(0))
DISTINCT = 256  # photographs; files beyond them repeat their bytes


def parse_args():
  parser = make_parser(__doc__)
  parser.add_argument('--files', type=int, default=20_000, help='number of files')
  parser.add_argument('--size', type=int, default=256, help='side of the files, in pixels')
  parser.add_argument('--image_size', type=int, default=224, help='side for the model')
  parser.add_argument('--batch', type=int, default=64, help='images per batch')
  workers = 'threads and cores of each side'
  parser.add_argument('--workers', type=integers, default=[1, 2, 4], help=workers)
  parser.add_argument('--turn', type=int, default=2_048, help='images per turn of a side')
  parser.add_argument('--turns', type=int, default=5, help='timed turns of each side')
  return parser.parse_args()


def photo(rng, side):
  """The bytes of an image with the power spectrum of photographs."""
  frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side))
  frequency[0, 0] = np.inf

  def plane():
    phases = rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
    levels = np.fft.irfft2(phases / frequency**1.2, (side, side))
    return levels / levels.std()

  grey = plane()
  red = plane()
  blue = plane()
  levels = 128 + 55 * grey[..., None] + 15 * np.stack([red, -red - blue, blue], axis=-1)
  return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def write_files(args, folder):
  """Writes the files, one folder per class, and returns their paths."""
  rng = np.random.default_rng(0)
  paths = []
  for i in range(args.files):
    path = folder / 'train' / f'class_{i % NUM_CLASSES}' / f'{i:06}.jpg'
    path.parent.mkdir(parents=True, exist_ok=True)
    if i < DISTINCT:
      photo(rng, args.size).save(path, quality=90)
    else:
      path.write_bytes(paths[i % DISTINCT].read_bytes())
    paths.append(path)
  return paths


def write_tfds(folder, paths, file_format):
  """A TFDS data set of the same files, byte by byte."""
  identity = tfds.core.DatasetIdentity(
    name='photos', version=tfds.core.Version('1.0.0'), data_dir=str(folder), module_name=''
  )
  label = tfds.features.ClassLabel(num_classes=NUM_CLASSES)
  image = tfds.features.Image(encoding_format='jpeg')
  features = tfds.features.FeaturesDict({'image': image, 'label': label})
  info = tfds.core.DatasetInfo(builder=identity, features=features)
  folder.mkdir(parents=True)
  writer = tfds.core.SequentialWriter(info, 1_000, file_format=file_format)
  writer.initialize_splits(['train'])
  writer.add_examples(
    {'train': [{'image': str(path), 'label': i % NUM_CLASSES} for i, path in enumerate(paths)]}
  )
  writer.close_all()


def theirs(args, examples, workers, antialias=True):
  """tf.data's batches of a data set of JPEG bytes and labels."""
  size = args.image_size

  def augment(number, example):
    encoded, label = example
    image = tf.io.decode_jpeg(encoded, 3)
    seed = tf.stack([number, 0])
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
      tf.shape(image),
      tf.zeros([0, 0, 4]),
      seed,
      area_range=(0.05, 1.0),
      aspect_ratio_range=(3 / 4, 4 / 3),
      min_object_covered=0.0,
      use_image_if_no_bounding_boxes=True,
    )
    image = tf.image.resize(tf.slice(image, begin, extent), [size, size], antialias=antialias)
    image = tf.image.stateless_random_flip_left_right(image, seed)
    return tf.ensure_shape(image * (2 / 255) - 1, [size, size, 3]), label

  options = tf.data.Options()
  options.threading.private_threadpool_size = workers
  dataset = examples.repeat().enumerate().map(augment, num_parallel_calls=workers)
  return iter(dataset.batch(args.batch).prefetch(2).with_options(options).as_numpy_iterator())


def ours(args, task, workers):
  lengths = {'image': args.image_size, 'label': 1}
  return get_dataset(DatasetConfig(task, lengths, 'train', args.batch, num_threads=workers))


def use_cores(number):
  """Confines all threads of the process to the first cores."""
  for thread in os.listdir('/proc/self/task'):
    os.sched_setaffinity(int(thread), CORES[:number])


def drain(batches, number):
  """Reads and drops batches: memory of kept ones would have to be fetched from the machine."""
  collections.deque(itertools.islice(batches, number), maxlen=0)


def compare(args, source, workers, sides):
  """One row; the sides take turns."""
  num_batches = -(-args.turn // args.batch)
  rates = {name: [] for name in sides}  # images per second, and per second of CPU time
  for _ in range(args.turns):
    for name, batches in sides.items():
      # What was read ahead in the last turn, and in the first the building of the graph.
      drain(batches, 2 + pipeline.PREFETCHED_BATCHES + workers)
      start = np.array([time.perf_counter(), time.process_time()])
      drain(batches, num_batches)
      seconds = np.array([time.perf_counter(), time.process_time()]) - start
      rates[name].append(num_batches * args.batch / seconds)
  medians = {name: np.median(x, axis=0) for name, x in rates.items()}
  ratios, cpu_ratios = (np.array(rates['ours']) / np.array(rates['theirs'])).T
  return {
    'source': source,
    'workers': workers,
    **{f'{name}_images_per_second': float(x) for name, (x, _) in medians.items()},
    'ratio': float(np.median(ratios)),
    'lowest': float(min(ratios)),
    'highest': float(max(ratios)),
    **{f'{name}_images_per_cpu_second': float(medians[name][1]) for name in ('ours', 'theirs')},
    'cpu_ratio': float(np.median(cpu_ratios)),
  }


def main():
  args = parse_args()
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    paths = write_files(args, folder / 'photos')
    names = list(map(str, paths))
    labels = np.arange(len(paths)) % NUM_CLASSES
    for file_format in ('tfrecord', 'array_record'):
      write_tfds(folder / file_format / 'photos' / '1.0.0', paths, file_format)
    tfds.core.add_data_dir(str(folder / 'array_record'))
    records = tfds.builder_from_directory(folder / 'tfrecord' / 'photos' / '1.0.0').as_dataset(
      split='train',
      decoders={'image': tfds.decode.SkipDecoding()},
      read_config=tfds.ReadConfig(try_autocache=False),
    )
    sources = {
      'image_folder': (
        f'image_folder:{folder}/photos',
        tf.data.Dataset.from_tensor_slices((names, labels)).map(
          lambda path, label: (tf.io.read_file(path), label)
        ),
      ),
      'tfds': ('tfds:photos', records.map(lambda example: (example['image'], example['label']))),
    }
    for source, (task, examples) in sources.items():
      for workers in args.workers:
        sides = {
          'ours': ours(args, task, workers),
          'theirs': theirs(args, examples, workers),
          'theirs_without_antialias': theirs(args, examples, workers, antialias=False),
        }
        use_cores(workers)
        rows.append(compare(args, source, workers, sides))
        sides['ours'].close()
  report(args.json, rows)
  slowest = min(rows, key=lambda row: row['ratio'])
  print(
    f'at least {slowest["ratio"]:.2f} times the rate of tf.data ({slowest["source"]}, '
    f'{slowest["workers"]} workers)'
  )


if __name__ == '__main__':
  main()
