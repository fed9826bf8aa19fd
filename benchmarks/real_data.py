"""Few-shot accuracy of trained runs on real images: digits, Omniglot and emoji.

    python benchmarks/real_data.py --data DIR --checkpoint det=runs/quickstart/det \\
      --checkpoint het_xl=runs/quickstart/het_xl --json real_data.json

Evaluates the pre-logits of each run and, as a baseline, the pixels: as they are stored ('pixels'),
and, if these differ, in the size and channels that a run takes. All are evaluated on the same
draws. With several runs, a second table gives their differences to the first.

Linear: ridge regression on a fixed training split (the few-shot protocol, l2 by leave-one-out),
tested on the whole other split. The errors are over draws of the training images.
  digits    scikit-learn's, on the splits of the task 'digits'.
  omniglot  DIR/omniglot28.npz: all classes of the 20 evaluation alphabets (Lake et al. 2015,
            https://doi.org/10.1126/science.aab3050) at once. Drawers 1 to 10 of each character are
            the training split, 11 to 20 the test split. Ink is bright on black, as in the glyphs.
  emoji     DIR/noto_emoji64.npz: its groups; a fixed random half is the training split. Emoji are
            on white. A run that takes grey gets the mean of the colours.

Episodes, for omniglot only: 5 or 20 classes, drawn from all evaluation alphabets, with 1 or
5 training images and 5 test images per class; rotations are not classes of their own (the episodes
of Vinyals et al. 2016, https://arxiv.org/abs/1606.04080; those of Lake et al. stay within an
alphabet, which is harder). The errors are over episodes. The classifier is ridge regression at one
l2, or the class with the largest cosine to the mean of the normalised training images.

p is the two-sided p of paired t-tests: over episodes, or for linear the larger of those over draws
and over test images. It is about these parameters; another training run of the same head would
differ too.
Takes 3 to 4 minutes on two CPU cores with three runs of gin/runs/glyphs_quickstart.gin.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.stats
from command_line import integers, make_parser, names, print_table, write_json

from het_plugin.config import command_line, trained_run
from het_plugin.data import array_source
from het_plugin.evaluation import BIG_VISION_L2, FewShotResult, comparison, few_shot, ridge
from het_plugin.evaluation.extraction import RepresentationExtractor, match_channels

BATCH_SIZE = 256
EPISODES = ((5, 1), (5, 5), (20, 1), (20, 5))  # (ways, shots)
QUERIES = 5  # test images per class of an episode
TRAIN_DRAWERS = 10
PIXELS = 'pixels'


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSet:
  """Labelled images.

  Attributes:
    images: float32 [N, H, H, C], levels in [-1, 1].
    labels: int [N].
    train: bool [N], whether an image is in the training split; the others are the test split.
    episodes: (ways, shots) of episodes.
  """

  images: np.ndarray
  labels: np.ndarray
  train: np.ndarray
  episodes: tuple[tuple[int, int], ...] = ()


def load_digits(data: Path | None) -> ImageSet:
  del data  # scikit-learn contains them
  source = array_source.digits_source()
  splits = [
    source.read(split, np.arange(source.info.splits[split]), source.image_size, seed=0)
    for split in ('train', 'test')
  ]
  images, labels = (np.concatenate(arrays) for arrays in zip(*splits, strict=True))
  train = np.arange(len(images)) < source.info.splits['train']
  return ImageSet(images, labels[:, 0], train)


def load_omniglot(data: Path | None) -> ImageSet:
  file = load_arrays(data, 'omniglot28.npz', 'image', 'label', 'drawer', 'class_in_evaluation')
  rows = file['class_in_evaluation'][file['label']]
  return ImageSet(
    levels(file['image'][rows, ..., None]),
    file['label'][rows],
    file['drawer'][rows] <= TRAIN_DRAWERS,
    episodes=EPISODES,
  )


def load_emoji(data: Path | None) -> ImageSet:
  file = load_arrays(data, 'noto_emoji64.npz', 'image', 'group')
  train = np.zeros(len(file['group']), bool)
  train[array_source.fixed_split(len(train), 0.5)[1]] = True
  return ImageSet(levels(file['image']), file['group'], train)


DATASETS: dict[str, Callable[[Path | None], ImageSet]] = {
  'digits': load_digits,
  'omniglot': load_omniglot,
  'emoji': load_emoji,
}


def load_arrays(data: Path | None, name: str, *arrays: str) -> dict[str, np.ndarray]:
  """Arrays of a file in the folder `data`.

  Raises:
    ValueError: there is no folder, file or array of that name.
  """
  if data is None:
    raise ValueError(
      f'--data is needed, the folder of {name}: set it or HET_PLUGIN_DATA, or use --datasets=digits'
    )
  path = data / name
  if not path.is_file():
    raise ValueError(f'--data={data} has no file {name}')
  with np.load(path, allow_pickle=False) as file:
    if missing := [array for array in arrays if array not in file.files]:
      raise ValueError(f'{path} lacks the arrays {", ".join(missing)}')
    return {array: file[array] for array in arrays}


def levels(images: np.ndarray) -> np.ndarray:
  """uint8 to float32 in [-1, 1]."""
  return images.astype(np.float32) * np.float32(2 / 255) - np.float32(1)


def resized(images: np.ndarray, size: int) -> np.ndarray:
  """Images [B, H, H, C] with the side `size`, bilinear with antialiasing."""
  if images.shape[1] == size:
    return images
  shape = (len(images), size, size, images.shape[3])
  return np.asarray(jax.image.resize(images, shape, 'bilinear'))


def batches(images: np.ndarray, size: int, rows: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
  """All images in batches of BATCH_SIZE; yields the rows of each that this process feeds."""
  for start in range(0, len(images), BATCH_SIZE):
    index = start + rows
    mask = index < len(images)
    yield {
      'image': resized(images[np.where(mask, index, 0)], size),
      'label': np.zeros((len(rows), 1), np.int32),
      'index': index.astype(np.int32),
      'mask': mask.astype(np.float32),
    }


def pre_logits(
  checkpoint: str, datasets: Mapping[str, ImageSet]
) -> tuple[int, int, dict[str, np.ndarray]]:
  """Image side and channels that a run takes, and its representations [N, D] per data set."""
  run = trained_run.open_run(checkpoint)
  rows = run.partitioner.batch_rows(BATCH_SIZE)
  extractor = RepresentationExtractor(
    run.model, run.partitioner, run.param_specs, channels=run.channels
  )
  features = {
    name: extractor(run.params, batches(data.images, run.image_size, rows), BATCH_SIZE)[
      'pre_logits'
    ].features
    for name, data in datasets.items()
  }
  return run.image_size, run.channels, features


def pixels(images: np.ndarray) -> np.ndarray:
  """Pixels [N, D] with black at 0, which is what a cosine of pixels usually assumes."""
  return (images.reshape(len(images), -1) + 1) / 2


def linear(
  features: np.ndarray, data: ImageSet, shots: Sequence[int], seeds: Sequence[int]
) -> dict[int, FewShotResult]:
  """{shots: result} without shots that no class has; a single draw if it takes every image."""
  y, test = data.labels[data.train], ~data.train
  largest_class = np.bincount(y).max()
  results = {}
  for num in shots:
    if num <= largest_class:
      results |= few_shot(
        features[data.train],
        y,
        features[test],
        data.labels[test],
        shots=(num,),
        seeds=seeds if num < largest_class else seeds[:1],
      )
  return results


def draw_episode(labels: np.ndarray, ways: int, shots: int, number: int) -> np.ndarray:
  """Rows of the images of an episode, int64 [ways, shots + QUERIES], training images first."""
  rng = np.random.default_rng([number, ways, shots])
  classes = rng.choice(np.unique(labels), ways, replace=False)
  orders = [rng.permutation(np.flatnonzero(labels == c)) for c in classes]
  return np.stack([rows[: shots + QUERIES] for rows in orders])


def ridge_accuracy(train: np.ndarray, test: np.ndarray, l2: float) -> float:
  """Accuracy in one episode with features [ways, shots, D] and [ways, QUERIES, D]."""
  ways, shots, dim = train.shape
  model = ridge.decompose(train.reshape(-1, dim), np.repeat(np.arange(ways), shots))
  predicted = model.predict(test.reshape(-1, dim), [l2]).reshape(ways, -1)
  return float((predicted == np.arange(ways)[:, None]).mean())


def nearest_mean_accuracy(train: np.ndarray, test: np.ndarray) -> float:
  """Accuracy in one episode by the largest cosine."""
  centres = normalised(normalised(train).mean(axis=1))  # [ways, D]
  predicted = (test @ centres.T).argmax(axis=-1)  # [ways, QUERIES]; the test norms do not matter
  return float((predicted == np.arange(len(train))[:, None]).mean())


def normalised(x: np.ndarray) -> np.ndarray:
  """Rows divided by their norms; zeros stay zeros."""
  return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.finfo(x.dtype).tiny)


def episode_accuracies(
  features: np.ndarray, rows: Sequence[np.ndarray], shots: int, l2: float
) -> dict[str, np.ndarray]:
  """{classifier: accuracy of each episode}."""
  accuracies = []
  for picked in rows:
    x = features[picked]  # [ways, shots + QUERIES, D]
    train, test = x[:, :shots], x[:, shots:]
    accuracies.append((ridge_accuracy(train, test, l2), nearest_mean_accuracy(train, test)))
  return dict(zip(('ridge', 'nearest mean'), np.array(accuracies).T, strict=True))


def evaluate_linear(
  data: ImageSet,
  features: Mapping[str, np.ndarray],
  shots: Sequence[int],
  seeds: Sequence[int],
  base: str | None,
) -> list[dict[str, Any]]:
  """One row per representation and number of shots."""
  results = {name: linear(x, data, shots, seeds) for name, x in features.items()}
  ways = len(np.unique(data.labels))
  rows = []
  for name, by_shots in results.items():
    for num, result in by_shots.items():
      row = {'classifier': 'linear', 'representation': name, 'dim': features[name].shape[1]}
      row |= {'ways': ways, 'shots': num, 'mean': result.mean, 'stderr': result.stderr}
      row |= {'classes_short': result.classes_short}
      if is_compared(name, base):
        gain = comparison.difference(result, results[base][num])
        ps = [p for p in (gain.p_draws, gain.p_rows) if p is not None]
        row |= {'difference': gain.mean, 'p': max(ps, default=None)}
      rows.append(row)
  return rows


def evaluate_episodes(
  data: ImageSet, features: Mapping[str, np.ndarray], num: int, l2: float, base: str | None
) -> list[dict[str, Any]]:
  """One row per size of the episodes, representation and classifier."""
  rows = []
  for ways, shots in data.episodes:
    drawn = [draw_episode(data.labels, ways, shots, number) for number in range(num)]
    results = {name: episode_accuracies(x, drawn, shots, l2) for name, x in features.items()}
    for name, by_classifier in results.items():
      for classifier, accuracies in by_classifier.items():
        row = {'classifier': classifier, 'representation': name, 'dim': features[name].shape[1]}
        row |= {'ways': ways, 'shots': shots}
        row |= {'mean': float(accuracies.mean()), 'stderr': float(scipy.stats.sem(accuracies))}
        if is_compared(name, base):
          gains = accuracies - results[base][classifier]
          p = float(scipy.stats.ttest_1samp(gains, 0).pvalue) if np.ptp(gains) else None
          row |= {'difference': float(gains.mean()), 'p': p}
        rows.append(row)
  return rows


def is_compared(name: str, base: str | None) -> bool:
  """Whether a row belongs to a run other than the first."""
  return name != base and not name.startswith(PIXELS)


def print_tables(dataset: str, rows: Sequence[Mapping[str, Any]], base: str | None) -> None:
  """Prints a table of accuracies per classifier, and one of differences if there are any."""
  for classifier in dict.fromkeys(row['classifier'] for row in rows):
    members = [row for row in rows if row['classifier'] == classifier]
    title = f'{dataset}, {classifier}'
    print(f'\n{title}: accuracy')
    print_grid(members, accuracy_cell)
    differing = [row for row in members if 'difference' in row]
    if differing:
      print(f'\n{title}: difference to {base}')
      print_grid(differing, difference_cell)


def print_grid(rows: Sequence[Mapping[str, Any]], cell: Callable[[Mapping[str, Any]], str]) -> None:
  settings = list(dict.fromkeys((row['ways'], row['shots']) for row in rows))
  cells = {(row['representation'], row['ways'], row['shots']): cell(row) for row in rows}
  header = ['', *(f'{ways}-way {shots}-shot' for ways, shots in settings)]
  lines = [
    [name, *(cells[name, *setting] for setting in settings)]
    for name in dict.fromkeys(row['representation'] for row in rows)
  ]
  print_table(header, lines)


def accuracy_cell(row: Mapping[str, Any]) -> str:
  error = '' if row['stderr'] is None else f' ±{row["stderr"]:.3f}'
  return f'{row["mean"]:.3f}{error}'


def difference_cell(row: Mapping[str, Any]) -> str:
  p = '' if row['p'] is None else f' (p {row["p"]:.2g})'
  return f'{row["difference"]:+.3f}{p}'


def named_checkpoint(text: str) -> tuple[str, str]:
  name, _, checkpoint = text.partition('=')
  if not name or not checkpoint:
    raise argparse.ArgumentTypeError(f'{text!r} must be NAME=RUN_DIR')
  if name.startswith(PIXELS):
    raise argparse.ArgumentTypeError(f'{text!r}: rows named {PIXELS} are the baselines')
  return name, checkpoint


def make_flags() -> argparse.ArgumentParser:
  parser = make_parser(__doc__)
  folder = os.environ.get('HET_PLUGIN_DATA')
  parser.add_argument(
    '--data',
    type=Path,
    default=Path(folder) if folder else None,
    help='folder of the .npz files; $HET_PLUGIN_DATA by default',
  )
  parser.add_argument(
    '--datasets', type=names(DATASETS), default=list(DATASETS), help='such as digits,omniglot'
  )
  parser.add_argument(
    '--checkpoint',
    type=named_checkpoint,
    action='append',
    default=[],
    help='NAME=RUN_DIR, a run or one checkpoint of it; may be given several times',
  )
  parser.add_argument(
    '--shots',
    type=integers,
    default=[1, 5, 10, 25],
    help='training images per class, linear',
  )
  parser.add_argument('--episodes', type=int, default=1000, help='number per size, 2 or more')
  parser.add_argument(
    '--l2', type=float, default=BIG_VISION_L2, help='strength of the ridge regression in episodes'
  )
  parser.add_argument(
    '--seeds', type=integers, default=[0, 1, 2, 3, 4], help='draws of linear evaluation'
  )
  return parser


def check_flags(args: argparse.Namespace) -> None:
  """Raises ValueError, in one sentence, for a flag that cannot be used."""
  if len({name for name, _ in args.checkpoint}) < len(args.checkpoint):
    raise ValueError('--checkpoint: each run needs a name of its own')
  if args.episodes < 2:
    raise ValueError(f'--episodes={args.episodes} must be 2 or more: they have a standard error')
  if not 0 < args.l2 < np.inf:
    raise ValueError(f'--l2={args.l2} must be a finite number > 0')
  if min(args.seeds) < 0 or min(args.shots) < 1:
    raise ValueError(f'--seeds={args.seeds} must be 0 or more, --shots={args.shots} 1 or more')


def main() -> None:
  parser = make_flags()
  args = parser.parse_args()
  try:
    check_flags(args)
    datasets = {name: DATASETS[name](args.data) for name in args.datasets}
  except ValueError as error:
    parser.error(str(error))
  features = {name: {PIXELS: pixels(data.images)} for name, data in datasets.items()}
  of_runs = {}
  for name, checkpoint in args.checkpoint:
    try:
      size, channels, of_runs[name] = pre_logits(checkpoint, datasets)
    except ValueError as error:
      parser.error(f'--checkpoint={name}={checkpoint}: {command_line.one_sentence(error)}')
    for dataset, data in datasets.items():
      row = f'{PIXELS} {size}x{size}x{channels}'
      if data.images.shape[2:] != (size, channels) and row not in features[dataset]:
        taken = np.asarray(match_channels(resized(data.images, size), channels))
        features[dataset][row] = pixels(taken)
  base = args.checkpoint[0][0] if args.checkpoint else None
  rows = []
  for dataset, data in datasets.items():
    represented = features[dataset] | {name: x[dataset] for name, x in of_runs.items()}
    found = evaluate_linear(data, represented, args.shots, args.seeds, base)
    found += evaluate_episodes(data, represented, args.episodes, args.l2, base)
    print_tables(dataset, found, base)
    rows += [{'dataset': dataset, **row} for row in found]
  write_json(args.json, rows)


if __name__ == '__main__':
  main()
