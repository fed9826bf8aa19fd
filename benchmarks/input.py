"""Training on JPEG files: how long it waits for data, and how fast files are read.

    python benchmarks/input.py [--json OUT]
    python benchmarks/input.py --photos=24 --photo_size=60,45 --image_size=16 --backbone=tiny \\
      --batch=4 --steps=4 --repeats=1

Makes JPEG files with the spectrum of photographs, 500 x 375 at quality 90, about 100 kB each.

1. Trains a ViT-Ti/16 at 224 pixels on them, with random crops and flips, and prints the share of
   time that the loop waited for its next batch. The first batches, which fill the queue, are
   printed separately.
2. Reads all files with our pipeline and, in turns, with a TensorFlow Datasets data set of the same
   files, timed by TFDS's own benchmark: decoded only (ours with a central crop that does not
   resize, and in batches), and with the crops and flips of training. Rates are images per second of
   CPU time, so they are per core and depend little on other processes.

Takes two minutes on two CPU cores, the second command some seconds.
"""

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from command_line import integers, make_parser, print_table, write_json
from loop import BACKBONES, classifier
from PIL import Image
from tensorflow_datasets.core.utils import benchmark as tfds_benchmark

from het_plugin.data import DatasetConfig, get_dataset, preprocess, tasks
from het_plugin.data.image_folder import ImageFolderSource
from het_plugin.data.tf_host import tf
from het_plugin.training import actions, checkpoints, partitioning
from het_plugin.training.train import train

NUM_CLASSES = 4
DECODE = (preprocess.central_crop(), preprocess.value_range())
AUGMENT = (preprocess.inception_crop(), preprocess.flip_left_right(), preprocess.value_range())


def parse_args():
  parser = make_parser(__doc__)
  parser.add_argument('--photos', type=int, default=256, help='number of files')
  parser.add_argument('--photo_size', type=integers, default=[500, 375], help='width,height')
  parser.add_argument('--image_size', type=int, default=224, help='height and width for the model')
  parser.add_argument('--backbone', choices=BACKBONES, default='vit_ti', help='size of the model')
  parser.add_argument('--batch', type=int, default=16, help='images per batch')
  parser.add_argument('--steps', type=int, default=40, help='training steps')
  parser.add_argument('--repeats', type=int, default=7, help='timed turns of each side')
  return parser.parse_args()


def photo(rng, width, height):
  """An image with the power spectrum of photographs."""
  frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
  frequency[0, 0] = np.inf

  def plane():
    phases = rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
    levels = np.fft.irfft2(phases / frequency**1.2, (height, width))
    return levels / levels.std()

  grey, red, blue = plane(), plane(), plane()
  levels = 128 + 55 * grey[..., None] + 15 * np.stack([red, -red - blue, blue], axis=-1)
  return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def write_photos(args, folder):
  """Writes the files, one folder per class, and returns their paths."""
  rng = np.random.default_rng(0)
  paths = []
  for i in range(args.photos):
    path = folder / 'train' / f'class_{i % NUM_CLASSES}' / f'{i:06}.jpg'
    path.parent.mkdir(parents=True, exist_ok=True)
    photo(rng, *args.photo_size).save(path, quality=90)
    paths.append(path)
  return paths


def write_tfds(folder, paths):
  """A TFDS data set of the same files, byte by byte."""
  identity = tfds.core.DatasetIdentity(
    name='photos', version=tfds.core.Version('1.0.0'), data_dir=str(folder), module_name=''
  )
  features = tfds.features.FeaturesDict({'image': tfds.features.Image(encoding_format='jpeg')})
  info = tfds.core.DatasetInfo(builder=identity, features=features)
  folder.mkdir()
  writer = tfds.core.SequentialWriter(info, max_examples_per_shard=64)
  writer.initialize_splits(['train'])
  writer.add_examples({'train': [{'image': str(path)} for path in paths]})
  writer.close_all()
  return tfds.builder_from_directory(folder)


class Recorder(actions.BaseAction):
  """Keeps the training metrics."""

  def __init__(self):
    self.metrics = []

  def run(self, train_state, metrics_by_task):
    self.metrics.append(metrics_by_task['train'])
    return False


def waiting(args, photos, model_dir):
  """Milliseconds per step, and the share spent waiting for data, at the start and later."""
  period = max(args.steps // 4, 1)
  recorder = Recorder()
  train(
    model=classifier(args.backbone, NUM_CLASSES),
    train_dataset_cfg=DatasetConfig(
      f'image_folder:{photos}', {'image': args.image_size, 'label': 1}, 'train', args.batch
    ),
    train_eval_dataset_cfg=None,
    checkpoint_cfg=checkpoints.CheckpointConfig(),
    partitioner=partitioning.PjitPartitioner(),
    model_dir=model_dir,
    total_steps=args.steps,
    eval_steps=1,
    eval_period=period,
    actions={'TRAIN': [recorder]},
  )
  ms = [metrics['timing/ms_per_step'] for metrics in recorder.metrics]
  wait = [metrics['timing/data_wait_share'] for metrics in recorder.metrics]
  return {
    'ms_per_step': statistics.mean(ms[1:]),
    'wait_share': float(np.average(wait[1:], weights=ms[1:])),
    'first_wait_share': wait[0],
  }


class OnePass:
  """Iterates over the files once, in batches of our pipeline."""

  def __init__(self, args, task):
    self._cfg = DatasetConfig(
      task, {'image': args.image_size, 'label': 1}, 'train', args.batch, num_epochs=1
    )

  def __iter__(self):
    batches = get_dataset(self._cfg)
    with contextlib.closing(batches):
      yield from batches


def tfds_pipeline(args, dataset, preprocessors):
  """Applies the same preprocessing to a TFDS data set, in batches."""
  keyed = dataset.enumerate().map(
    lambda i, example: {**example, 'key': tf.stack([tf.cast(i, tf.int32), 0])},
    num_parallel_calls=tf.data.AUTOTUNE,
  )
  for preprocessor in preprocessors:
    keyed = preprocessor(keyed, {'image': args.image_size})
  return keyed.batch(args.batch).prefetch(tf.data.AUTOTUNE)


def rate(iterable, num_images):
  """Returns (images per second of CPU time, images per second)."""
  cpu = time.process_time()
  with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
    seen = tfds_benchmark.raw_benchmark(iterable)
  seconds = (seen.end_time - seen.start_time) / 1e9
  return num_images / (time.process_time() - cpu), num_images / seconds


def compare(args, work, ours, theirs):
  """One row. The first turn of each side builds its graph and does not count."""
  sides = {'ours': ours, 'tfds': theirs}
  rates = {name: [] for name in sides}
  for turn in range(args.repeats + 1):
    for name, iterable in sides.items():
      measured = rate(iterable, args.photos)
      if turn:
        rates[name].append(measured)
  cpu = {name: [x for x, _ in measured] for name, measured in rates.items()}
  ratios = [a / b for a, b in zip(cpu['ours'], cpu['tfds'], strict=True)]
  return {
    'work': work,
    **{f'{name}_per_core': statistics.median(cpu[name]) for name in sides},
    **{f'{name}_per_second': statistics.median(x for _, x in rates[name]) for name in sides},
    'ratio': statistics.median(ratios),
    'lowest': min(ratios),
    'highest': max(ratios),
  }


def main():
  args = parse_args()
  with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    paths = write_photos(args, folder / 'photos')
    kilobytes = sum(path.stat().st_size for path in paths) / args.photos / 1e3
    # TFDS would cache the decoded images of the first turn in memory.
    read_config = tfds.ReadConfig(try_autocache=False)
    builder = write_tfds(folder / 'tfds', paths)
    dataset = builder.as_dataset(split='train', read_config=read_config)
    source = ImageFolderSource(str(folder / 'photos'))
    decode, augment = (
      OnePass(args, tasks.add_image_task(name, source, preprocessors))
      for name, preprocessors in (('decode', DECODE), ('augment', AUGMENT))
    )
    rates = [
      compare(args, 'decode', decode, dataset),
      compare(args, 'decode, augment', augment, tfds_pipeline(args, dataset, AUGMENT)),
    ]
    training = waiting(args, folder / 'photos', folder / 'run')
  print(f'{args.photos} files of {kilobytes:.0f} kB; images/s')
  print_table(list(rates[0]), [list(row.values()) for row in rates])
  write_json(args.json, {'kilobytes': kilobytes, 'rates': rates, 'training': training})
  for row in rates:
    print(
      f'{row["work"]}: {row["ours_per_core"]:.0f} images/s per core, {row["ratio"]:.2f} times '
      f'those of TFDS ({row["lowest"]:.2f} to {row["highest"]:.2f})'
    )
  print(
    f'{args.backbone}: the loop waited for data {training["wait_share"]:.2%} of its time, '
    f'{training["ms_per_step"]:.0f} ms per step; {training["first_wait_share"]:.1%} at the start'
  )


if __name__ == '__main__':
  main()
