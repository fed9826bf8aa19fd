"""How fast JPEG files are read, cropped at random and mirrored, beside other libraries.

    python -m benchmarks.input [--json OUT]
    python -m benchmarks.input --files=64 --size=48 --image_size=16 --batch=8 --turn=64

Makes JPEG files with the spectrum of photographs, and writes them as an image folder, Parquet
files, tar shards, TFRecord and ArrayRecord. Reads each in random order with our pipeline and, in
turns, with a peer, decoded as it usually does: tf.data, datasets, webdataset and grain. Read,
decode, random crop of 5% to 100% of the area, antialiased resize, flip, levels in [-1, 1], batches.
A peer that is not installed is a word in its row. `image_folder` is a peer, too: what a format
costs over a folder.

A row has images per second of CPU time, of all threads of the process, which is what an image
costs, also on a busy machine.
"""

import collections
import importlib.util
import io
import itertools
import os
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.command_line import make_parser, names, report
from het_plugin.data import DatasetConfig, get_dataset, pipeline

NUM_CLASSES = 4
DISTINCT = 256  # photographs; files beyond them repeat their bytes
SHARD = 1_000  # images of a shard
ROW_GROUP = 100
BUFFER = 1_000  # examples that webdataset shuffles, its usual number
FORMATS = 'image_folder', 'parquet', 'webdataset', 'tfrecord', 'array_record'


def parse_args():
  parser = make_parser(__doc__)
  parser.add_argument('--files', type=int, default=4_000, help='number of images')
  parser.add_argument('--size', type=int, default=500, help='longer side of the files, in pixels')
  parser.add_argument('--image_size', type=int, default=224, help='side for the model')
  parser.add_argument('--batch', type=int, default=64, help='images per batch')
  parser.add_argument('--workers', type=int, default=1, help='threads of each side')
  parser.add_argument('--turn', type=int, default=512, help='images per turn of a side')
  parser.add_argument('--turns', type=int, default=5, help='timed turns of each side')
  parser.add_argument('--formats', type=names(FORMATS), default=FORMATS, help='of them all')
  return parser.parse_args()


def photo(rng, width):
  """An image of 4 : 3 with the power spectrum of photographs."""
  height = width * 3 // 4
  frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
  frequency[0, 0] = np.inf

  def plane():
    phases = rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
    levels = np.fft.irfft2(phases / frequency**1.2, (height, width))
    return levels / levels.std()

  grey = plane()
  red = plane()
  blue = plane()
  levels = 128 + 55 * grey[..., None] + 15 * np.stack([red, -red - blue, blue], axis=-1)
  return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def write(args, root):
  """Writes the images in each format."""
  rng = np.random.default_rng(0)
  distinct = []
  for _ in range(min(args.files, DISTINCT)):
    file = io.BytesIO()
    photo(rng, args.size).save(file, 'JPEG', quality=90)
    distinct.append(file.getvalue())
  images = [distinct[i % DISTINCT] for i in range(args.files)]
  labels = [i % NUM_CLASSES for i in range(args.files)]
  for name in FORMATS:
    (root / name).mkdir()
  for first in range(0, args.files, SHARD):
    part = slice(first, first + SHARD)
    shard = f'train-{first // SHARD:05}'
    write_parquet(root / 'parquet' / f'{shard}.parquet', images[part], labels[part])
    write_tar(root / 'webdataset' / f'{shard}.tar', first, images[part], labels[part])
    if {'tfrecord', 'array_record'} & set(args.formats):
      write_records(root, shard, images[part], labels[part])
  for i, (image, label) in enumerate(zip(images, labels, strict=True)):
    path = root / 'image_folder' / 'train' / f'class_{label}' / f'{i:06}.jpg'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image)


def write_parquet(path, images, labels):
  structs = [{'bytes': image, 'path': f'{i}.jpg'} for i, image in enumerate(images)]
  table = pa.table({'image': structs, 'label': labels})
  pq.write_table(table, path, row_group_size=ROW_GROUP, compression='none')


def write_tar(path, first, images, labels):
  with tarfile.open(path, 'w') as tar:
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
      for suffix, content in (('jpg', image), ('cls', str(label).encode())):
        member = tarfile.TarInfo(f'{first + i:08}.{suffix}')
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def write_records(root, shard, images, labels):
  """TF Examples in a TFRecord and an ArrayRecord file, written by their libraries."""
  import tensorflow as tf
  from array_record.python import array_record_module

  arrays = array_record_module.ArrayRecordWriter(
    str(root / 'array_record' / f'{shard}.array_record'), 'group_size:1'
  )
  with tf.io.TFRecordWriter(str(root / 'tfrecord' / f'{shard}.tfrecord')) as records:
    for image, label in zip(images, labels, strict=True):
      features = {
        'image/encoded': tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        'image/class/label': tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
      }
      example = tf.train.Example(features=tf.train.Features(feature=features))
      records.write(example.SerializeToString())
      arrays.write(example.SerializeToString())
  arrays.close()


def ours(args, root, name):
  lengths = {'image': args.image_size, 'label': 1}
  return get_dataset(
    DatasetConfig(
      f'{name}:{root}/{name}',
      lengths,
      'train',
      args.batch,
      augmentations=('inception', 'flip'),
      num_threads=args.workers,
    )
  )


def batches_of(args, examples):
  """Batches of (image, label) with endless examples."""
  while True:
    images, labels = zip(*itertools.islice(examples, args.batch), strict=True)
    yield np.stack(images), np.array(labels)


def augmented(args, image, rng):
  """The crop and the flip of a decoded Pillow image, float32."""
  width, height = image.size
  box = 0, 0, width, height
  for _ in range(10):
    area = width * height * rng.uniform(0.05, 1.0)
    aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    w = round((area * aspect) ** 0.5)
    h = round((area / aspect) ** 0.5)
    if 0 < w <= width and 0 < h <= height:
      left = rng.integers(width - w + 1)
      top = rng.integers(height - h + 1)
      box = left, top, left + w, top + h
      break
  size = (args.image_size,) * 2
  image = image.resize(size, Image.Resampling.BILINEAR, box)
  if rng.integers(2):
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
  return np.asarray(image, np.float32) * np.float32(2 / 255) - 1


def of_datasets(args, root):
  """Parquet files by datasets, shuffled, with random access."""
  import datasets

  datasets.disable_progress_bars()
  rng = np.random.default_rng(0)
  files = str(root / 'parquet' / '*.parquet')
  data = datasets.load_dataset(
    'parquet', data_files=files, split='train', cache_dir=str(root / 'cache')
  ).cast_column('image', datasets.Image())

  def examples():
    while True:
      for example in data.shuffle(seed=int(rng.integers(2**31))):
        yield augmented(args, example['image'].convert('RGB'), rng), example['label']

  return batches_of(args, examples())


def of_webdataset(args, root):
  """Tar shards by webdataset, without torch's loader."""
  import webdataset

  rng = np.random.default_rng(0)
  files = sorted(map(str, (root / 'webdataset').glob('*.tar')))
  data = webdataset.WebDataset(files, shardshuffle=len(files), empty_check=False)
  data = data.shuffle(BUFFER).decode('pil').to_tuple('jpg', 'cls').repeat()
  return batches_of(args, ((augmented(args, image, rng), label) for image, label in data))


def of_grain(args, root):
  """ArrayRecord files by grain; protocol buffers by TensorFlow's classes, images by Pillow."""
  import grain
  import tensorflow as tf

  def read(record, rng):
    example = tf.train.Example.FromString(record).features.feature
    image = Image.open(io.BytesIO(example['image/encoded'].bytes_list.value[0])).convert('RGB')
    return augmented(args, image, rng), example['image/class/label'].int64_list.value[0]

  files = sorted(map(str, (root / 'array_record').glob('*.array_record')))
  data = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(files)).seed(0).shuffle()
  data = data.repeat().random_map(read).batch(args.batch)
  options = grain.ReadOptions(num_threads=args.workers, prefetch_buffer_size=2 * args.workers)
  return iter(data.to_iter_dataset(options))


def of_tf_data(args, root, name):
  """An image folder or TFRecord files by tf.data, shuffled in a buffer."""
  import tensorflow as tf

  if name == 'image_folder':
    paths = sorted(map(str, (root / name).rglob('*.jpg')))
    labels = [int(Path(path).parent.name[-1]) for path in paths]
    examples = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths))
    examples = examples.map(lambda path, label: (tf.io.read_file(path), label))
  else:
    fields = {
      'image/encoded': tf.io.FixedLenFeature([], tf.string),
      'image/class/label': tf.io.FixedLenFeature([], tf.int64),
    }
    records = tf.data.TFRecordDataset(sorted(map(str, (root / name).glob('*.tfrecord'))))
    records = records.shuffle(BUFFER)

    def parse(record):
      example = tf.io.parse_single_example(record, fields)
      return example['image/encoded'], example['image/class/label']

    examples = records.map(parse)
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
    image = tf.image.resize(tf.slice(image, begin, extent), [size, size], antialias=True)
    image = tf.image.stateless_random_flip_left_right(image, seed)
    return tf.ensure_shape(image * (2 / 255) - 1, [size, size, 3]), label

  options = tf.data.Options()
  options.threading.private_threadpool_size = args.workers
  dataset = examples.repeat().enumerate().map(augment, num_parallel_calls=args.workers)
  return iter(dataset.batch(args.batch).prefetch(2).with_options(options).as_numpy_iterator())


PEERS = {
  'image_folder': ('tensorflow', lambda args, root: of_tf_data(args, root, 'image_folder')),
  'parquet': ('datasets', of_datasets),
  'webdataset': ('webdataset', of_webdataset),
  'tfrecord': ('tensorflow', lambda args, root: of_tf_data(args, root, 'tfrecord')),
  'array_record': ('grain', of_grain),
}


def drain(batches, number):
  """Reads and drops batches: memory of kept ones would have to be fetched from the machine."""
  collections.deque(itertools.islice(batches, number), maxlen=0)


def compare(args, data, peer, sides):
  """One row; the two sides take turns."""
  num_batches = -(-args.turn // args.batch)
  rates = [[], []]  # images per second of CPU time
  for _ in range(args.turns):
    for batches, found in zip(sides, rates, strict=True):
      # What was read ahead in the last turn, and in the first the building of the graph.
      drain(batches, 2 + pipeline.PREFETCHED_BATCHES + args.workers)
      start = time.process_time()
      drain(batches, num_batches)
      found.append(num_batches * args.batch / (time.process_time() - start))
  ratios = np.divide(*rates)
  our_rate, their_rate = np.median(rates, axis=1).tolist()
  return {
    'data': data,
    'peer_library': peer,
    'ours': our_rate,
    'peer': their_rate,
    'ratio': float(np.median(ratios)),
    'lowest': float(ratios.min()),
    'highest': float(ratios.max()),
  }


def compare_all(args, root):
  """A row of each format beside its peer, and beside our image folder."""
  for data in args.formats:
    library, make = PEERS[data]
    if importlib.util.find_spec(library) is None:
      yield {'data': data, 'peer_library': f'{library} is not installed'}
    else:
      sides = ours(args, root, data), make(args, root)
      yield compare(args, data, library, sides)
      sides[0].close()
    if data != 'image_folder':
      sides = ours(args, root, data), ours(args, root, 'image_folder')
      yield compare(args, data, 'image_folder', sides)
      for side in sides:
        side.close()


def main():
  args = parse_args()
  with tempfile.TemporaryDirectory() as folder:
    os.environ['XDG_CACHE_HOME'] = f'{folder}/cache'
    write(args, Path(folder))
    rows = list(compare_all(args, Path(folder)))
  names = list(dict.fromkeys(name for row in rows for name in row))
  report(args.json, [{name: row.get(name) for name in names} for row in rows])


if __name__ == '__main__':
  main()
