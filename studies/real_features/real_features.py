"""Heads fitted to their optimum on frozen representations of a DET backbone.

    python -m studies.real_features.real_features --json OUT [--parts glyphs] [--data DIR]

    glyphs      images and labels of glyphs_noisy, whose distribution is known: A and the
                characters that are taken for each other most often, --classes in all (up to
                2,297), without images that are labelled as another one
    glyphs_full the same of the 6,494 characters of glyphs_full, with their true classes as labels
    omniglot    the first 200 characters of DIR/omniglot28.npz, on the backbone of glyphs; folds
                are of drawers
    aggre, worse, annotators
                CIFAR-10 with people's labels (CIFAR-10N; all three annotators as votes), from
                DIR/cifar10_human.npz. The heads are tested on such labels of other images, and on
                the published labels and those of 51 people each (CIFAR-10H) of the test images. One
                backbone, trained on `worse`

A part trains its backbone with `het_plugin.train`, writes representations of other images with
`het_plugin.represent`, and fits heads to folds of them. Of the rows for a fit a fifth is held out:
DET chooses C there, and the other heads, at this C, the C_noise that `probe.choose` takes.
Everything is kept in --work_dir, and the same command goes on where it stopped. Rows that --json
already has are not measured again.

A row has the mean NLL of a head on test rows, and its differences to DET (`to_det`) and to DET
with a learned tau (`to_det_tau`). `stderr` is over examples and `stderr_folds` over folds, whose
fits share rows; `extreme` is the share of a difference that 1% of the examples make, and `kl` the
divergence from the labels' distribution.
"""

import functools
import io
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import special
from sklearn.model_selection import GroupKFold, GroupShuffleSplit

from benchmarks.command_line import (
  integers,
  make_parser,
  names,
  numbers,
  print_table,
  read_json,
  write_json,
)
from het_plugin.data.glyphs import NoisyGlyphSource
from het_plugin.estimators import load, save
from het_plugin.measures import uncertainty
from het_plugin.measures.comparison import extreme_share
from het_plugin.rows import read as read_rows
from studies.known_truth.known_truth import fit_best

ROOT = Path(__file__).resolve().parents[2]
PEOPLE = ('aggre', 'worse', 'annotators')
FILES = {'omniglot': 'omniglot28.npz', **dict.fromkeys(PEOPLE, 'cifar10_human.npz')}
HEADS = ('det', 'det_tau', 'het', 'het_h', 'het_xl')
CHARACTERS = 200  # of Omniglot
CS = {  # of DET
  **dict.fromkeys(('glyphs', 'glyphs_full', 'omniglot'), (0.001, 0.01, 0.03, 0.1, 1.0, 10.0)),
  **dict.fromkeys(PEOPLE, (0.1, 1.0, 10.0, 100.0)),
}
NOISE_CS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # ascending
NUM_FACTORS = 4
MAX_ITER = 600
BLOCK = 4096  # rows that are tested at once


# A part is the NPZ file of its images, of which the heads see the split 'heads'; gin files and
# bindings of its backbone; what the heads are fitted to, int [N, L], several labels being votes;
# groups [N], whose rows are in one fold; and tests by name: a split, and a function from the
# numbers of its rows to the shares of the classes among their labels, [n, K].


def glyphs(args, class_set='core'):
  source = NoisyGlyphSource(class_set)
  num_classes = source.info.num_classes
  chosen = most_confused(source, num_classes, args.classes)
  ids = []
  for block in np.array_split(np.arange(args.rows_per_class * num_classes), args.rows_per_class):
    classes, _ = source.label_distribution('train', block)
    ids.append(block[np.isin(classes[:, 0], chosen)])
  ids = np.concatenate(ids)
  image, label = source.read('train', ids, 28, 0)
  classes, p = source.label_distribution('train', ids)
  if class_set == 'full':
    label = classes[:, :1]
  keep = np.isin(label[:, 0], chosen)
  label = np.searchsorted(chosen, label[keep, 0])
  split = np.full(len(label), 'heads')
  path = args.work_dir / f'glyphs_{class_set}' / 'images.npz'
  write_images(path, image=(image[keep] + 1) / 2, label=label, split=split)
  tests = {'other images': ('heads', shares_of(label[:, None], len(chosen)))}
  if class_set == 'core':
    classes = classes[keep]
    p = p[keep]

    def known(rows):
      shares = np.zeros((len(rows), num_classes))
      np.add.at(shares, (np.arange(len(rows))[:, None], classes[rows]), p[rows])
      return shares[:, chosen] / shares[:, chosen].sum(axis=1, keepdims=True)

    tests['known'] = ('heads', known)
  dataset = 'glyphs_noisy' if class_set == 'core' else 'glyphs_full'
  return path, *glyph_backbone(args, dataset), label[:, None], np.arange(len(label)), tests


def glyph_backbone(args, dataset='glyphs_noisy'):
  files = ['runs/glyphs', f'datasets/{dataset}', 'heads/det']
  # Seed 0 has the rows of the heads.
  steps = args.steps or 1000
  bindings = {'TRAIN_STEPS': steps, 'WARMUP_STEPS': min(100, steps - 1)}
  bindings |= {'vit.width': args.dim, 'vit.mlp_dim': 2 * args.dim}
  return files, bindings | {'RANDOM_SEED': 1, 'ACTIONS': None}


def omniglot(args):
  data = np.load(args.data / FILES['omniglot'])
  chosen = data['label'] < CHARACTERS
  label = data['label'][chosen].astype(np.int32)
  path = args.work_dir / 'glyphs_core' / 'omniglot.npz'
  write_images(path, image=data['image'][chosen], label=label, split=np.full(len(label), 'heads'))
  tests = {'other drawers': ('heads', shares_of(label[:, None], CHARACTERS))}
  return path, *glyph_backbone(args), label[:, None], data['drawer'][chosen], tests


def shares_of(labels, num_classes):
  """The shares of the classes among labels [N, L], of rows by number."""
  return lambda rows: np.eye(num_classes)[labels[rows]].mean(axis=1)


def most_confused(source, num_classes, num_chosen):
  """Ascending classes: A, and one by one what the classes so far are taken for most often."""
  classes, p = source.label_distribution('train', np.arange(12 * num_classes))
  taken = np.zeros((num_classes, num_classes))
  np.add.at(taken, (classes[:, :1], classes), p)
  taken += taken.T
  np.fill_diagonal(taken, 0)
  chosen = [source.info.class_names.index('LATIN CAPITAL LETTER A')]
  pull = np.zeros(num_classes)
  while len(chosen) < num_chosen:
    pull += taken[chosen[-1]]
    pull[chosen] = -1.0
    chosen.append(int(pull.argmax()))
  return np.sort(chosen)


def people(labels, args):
  data = np.load(args.data / FILES[labels])
  path = args.work_dir / 'people' / 'images.npz'
  if not path.exists():
    ends = data['jpeg_offset']
    jpeg = data['jpeg'].tobytes()
    image = [np.asarray(Image.open(io.BytesIO(jpeg[a:b]))) for a, b in itertools.pairwise(ends)]
    label = np.concatenate([data['worse'], data['label'][50_000:]])
    split = np.repeat(['train', 'heads', 'test'], [30_000, 20_000, 10_000])
    write_images(path, image=np.stack(image), label=label, split=split)
  files = ['runs/own_images', 'models/wrn_16_4', 'heads/det']
  bindings = {
    'wide_resnet.variant': '10-1',
    'train/DatasetConfig.augmentations': ('pad_crop', 'flip'),
    'NUM_CLASSES': 10,
    'IMAGE_SIZE': 32,
    'MIXTURE_OR_TASK_NAME': f'npz:{path}',
    'MAX_LABELS': 1,
    'BATCH_SIZE': 128,
    'TRAIN_STEPS': args.steps or 400,
    'warmup_schedule.total_steps': 600,
    'WARMUP_STEPS': 60,
    'LEARNING_RATE': 4e-3,
    'WEIGHT_DECAY': 0.01,
    'EVAL_SPLIT': 'test',
  }
  labels = data[labels].reshape(50_000, -1)[30_000:].astype(np.int32)
  counts = data['human_counts'] / data['human_counts'].sum(axis=1, keepdims=True)
  tests = {
    'other images': ('heads', shares_of(labels, 10)),
    'published': ('test', shares_of(data['label'][50_000:, None], 10)),
    '51 people': ('test', lambda rows: counts[rows]),
  }
  return path, files, bindings, labels, np.arange(len(labels)), tests


OTHERS = {
  'glyphs': glyphs,
  'glyphs_full': functools.partial(glyphs, class_set='full'),
  'omniglot': omniglot,
}


def write_images(path, **arrays):
  path.parent.mkdir(parents=True, exist_ok=True)
  if not path.exists():
    np.savez(path.with_suffix('.part.npz'), **arrays)
    path.with_suffix('.part.npz').rename(path)


def run_main(main, *flags):
  subprocess.run(
    [sys.executable, '-m', f'het_plugin.{main}', *map(str, flags)], cwd=ROOT, check=True
  )


def represent(images, gin_files, bindings, splits, max_rows):
  """{split: representations}, by a backbone that is trained first."""
  run = images.parent / 'backbone'
  folder = images.parent / images.stem / 'pre_logits'
  run_main(
    'train',
    *(f'--gin_file=gin/{file}.gin' for file in gin_files),
    *(f'--gin.{name}={value!r}' for name, value in {**bindings, 'MODEL_DIR': str(run)}.items()),
  )
  flags = f'--checkpoint={run}', f'--dataset=npz:{images}', f'--splits={",".join(splits)}'
  run_main('represent', *flags, f'--max_examples={max_rows}', f'--output_dir={images.parent}')
  return {x: read_rows(str(folder / f'{x}.safetensors')) for x in splits}


def fit(name, number, fitted, args, features, labels, groups):
  """Of the heads of a fold, one by one: its name, the estimator, the classes [k] that it has seen,
  and its settings."""
  folder = args.work_dir / name / 'fits'
  folder.mkdir(parents=True, exist_ok=True)
  parts = GroupShuffleSplit(1, test_size=0.2, random_state=0).split(fitted, groups=groups[fitted])
  train, held_out = (fitted[x] for x in next(parts))
  seen = np.unique(labels[train])
  held_out = held_out[np.isin(labels[held_out], seen).all(axis=1)]
  y = labels
  common = {'hidden_layers': tuple(args.hidden), 'solver': args.solver, 'max_iter': MAX_ITER}
  if labels.shape[1] > 1:
    common |= {'target': 'votes'}
  else:
    y = (labels == seen).astype(np.int8) if args.link == 'sigmoid' else labels[:, 0]
  train, held_out = ((features[x], y[x]) for x in (train, held_out))
  det = None
  for head in args.heads:
    path = folder / f'fold{number}_{head}.safetensors'
    if not path.exists():
      start = time.process_time()
      if head == 'det':
        grid = [{'C': c} for c in args.C or CS[name]]
      elif head == 'det_tau':
        grid = [{'C': det.C, 'tau': 'learned'}]
      else:
        noise = {'num_factors': NUM_FACTORS, 'num_samples': args.samples}
        grid = [{'C': det.C, 'C_noise': c_noise, **noise} for c_noise in args.C_noise or NOISE_CS]
      found, _, nll = fit_best(
        head.removesuffix('_tau'),
        [point | common for point in grid],
        train,
        held_out,
        start=None if head == 'det_tau' else det,
      )
      chosen = {'C': found.C, 'C_noise': getattr(found, 'C_noise', None)}
      chosen['held_out_nll'] = [float(x) for x in nll.mean(axis=1)]  # of the grid
      chosen['gradient'] = found.gradient_ if args.solver == 'lbfgs' else None
      chosen |= {'cpu_seconds': time.process_time() - start}
      path.with_suffix('.json').write_text(json.dumps(chosen))
      save(found, str(path))
    found = load(str(path))
    det = found if head == 'det' else det  # which comes first
    chosen = json.loads(path.with_suffix('.json').read_text())
    print(f'{name}, fold {number + 1} of {args.folds}, {head}: {chosen}', flush=True)
    yield head, found, seen, chosen


def measure(name, args, settings):
  """A row for each test and head."""
  part = people(name, args) if name in PEOPLE else OTHERS[name](args)
  *backbone, labels, groups, tests = part
  splits = sorted({split for split, _ in tests.values()})
  rows = represent(*backbone, splits, args.max_rows)
  labels, groups = (x[rows['heads'].index] for x in (labels, groups))
  folds = GroupKFold(args.folds, shuffle=True, random_state=0).split(labels, groups=groups)
  folds = list(folds)[: args.fits]
  # NLL, that of the truth, and accuracy: [3, folds, N], NaN where it was not tested. A row of the
  # heads' split is tested by the fold that has not seen it.
  values = {
    (test, head): np.full((3, len(folds), len(rows[split].index)), np.nan)
    for test, (split, _) in tests.items()
    for head in args.heads
  }
  settings_of = {head: [] for head in args.heads}
  for n, (fitted, others) in enumerate(folds):
    fits = fit(name, n, fitted, args, rows['heads'].features, labels, groups)
    for head, found, seen, chosen in fits:
      settings_of[head].append(chosen)
      for test, (split, shares) in tests.items():
        x = rows[split].features
        index = rows[split].index
        which = others if split == 'heads' else np.arange(len(x))
        for block in np.array_split(which, 1 + len(which) // BLOCK):
          log_p = found.predict_log_proba(x[block]).astype(float)
          of_seen = shares(index[block])[:, seen]
          values[test, head][:, n, block] = score(log_p, of_seen, args.link)
  results = []
  for test, head in values:
    nll, truth, right = values[test, head]
    tested = ~np.isnan(nll).all(axis=0)
    nll = nll[:, tested]
    row = {'part': name, 'test': test, 'head': head, 'settings': settings}
    row['examples'] = int(tested.sum())
    row |= mean_and_errors(nll, 'nll')
    row['precision_at_1'] = float(np.nanmean(right))
    row['kl'] = row['nll'] - float(np.nanmean(truth[:, tested], axis=0).mean())
    for other in args.heads[:2]:
      gap = nll - values[test, other][0][:, tested]
      row |= mean_and_errors(gap, f'to_{other}')
      row[f'to_{other}_extreme'] = extreme_share(np.nanmean(gap, axis=0))
    row['chosen'] = settings_of[head]
    results.append(row)
  return results


def score(log_p, shares, link):
  """NLL of log p [N, k], NLL of the shares of the k classes, and accuracy: [3, N].

  NaN where the labels have none of these classes, of which heads can say nothing.
  """
  with np.errstate(invalid='ignore'):
    shares = shares / shares.sum(axis=1, keepdims=True)
  right = shares[np.arange(len(shares)), log_p.argmax(axis=1)]
  return np.stack([cross_entropy(shares, log_p, link), entropy(shares, link), right])


def entropy(shares, link):
  """Of shares of the classes [N, K]; with a sigmoid the sum over the classes, [N]."""
  of_classes = special.entr(shares)
  if link == 'sigmoid':
    of_classes += special.entr(1 - shares)
  return of_classes.sum(axis=1)


def cross_entropy(shares, log_p, link):
  """Of shares of the classes and log p, both [N, K]; as `entropy`, [N]."""
  of_classes = -np.where(shares == 0, 0.0, shares * log_p)
  if link == 'sigmoid':
    of_classes -= np.where(shares == 1, 0.0, (1 - shares) * np.log(-np.expm1(log_p)))
  return of_classes.sum(axis=1)


def mean_and_errors(values, name):
  """Mean of [folds, N], NaN where untested, and standard errors over examples and folds."""
  per_example = np.nanmean(values, axis=0)
  per_fold = np.nanmean(values, axis=1)
  return {
    name: float(per_example.mean()),
    f'{name}_stderr': uncertainty.stderr(per_example),
    f'{name}_stderr_folds': uncertainty.stderr(per_fold),
  }


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--parts', type=names(CS), default=['glyphs'])
  parser.add_argument('--data', type=Path, help='folder of the files')
  parser.add_argument('--work_dir', type=Path, default=Path('runs/real_features'))
  parser.add_argument('--heads', type=names(HEADS), default=HEADS)
  parser.add_argument('--C', type=numbers, help='the values for DET, ascending')
  parser.add_argument('--C_noise', type=numbers, help='the values for the noise, ascending')
  parser.add_argument('--steps', type=int, help='of the backbones')
  parser.add_argument('--classes', type=int, default=10, help='of glyphs')
  parser.add_argument('--rows_per_class', type=int, default=1000, help='of glyphs')
  parser.add_argument('--max_rows', type=int, default=8000, help='of a split, for the heads')
  parser.add_argument('--dim', type=int, default=192, help='D of glyphs and omniglot')
  parser.add_argument('--solver', choices=['lbfgs', 'streamed'], default='lbfgs')
  parser.add_argument('--folds', type=int, default=4)
  parser.add_argument('--fits', type=int, help='of a head: the first folds; all by default')
  parser.add_argument('--samples', type=int, default=16, help='S')
  parser.add_argument('--link', choices=['softmax', 'sigmoid'], default='softmax')
  parser.add_argument('--hidden', type=integers, default=[], help='widths of layers below a head')
  args = parser.parse_args()
  args.heads = [head for head in HEADS if head in ('det', 'det_tau', *args.heads)]
  if args.link == 'sigmoid' and 'annotators' in args.parts:
    parser.error('--link=sigmoid has no votes, which --parts=annotators fits')
  for name, file in FILES.items():
    if name in args.parts and not (args.data and (args.data / file).exists()):
      parser.error(f'--data={args.data} has no {file}, which --parts={name} reads')
  args.work_dir = args.work_dir.absolute()
  args.work_dir.mkdir(parents=True, exist_ok=True)
  of_work_dir = args.work_dir / 'settings.json'
  elsewhere = 'json', 'parts', 'data', 'work_dir', 'heads', 'fits'
  settings = {x: value for x, value in vars(args).items() if x not in elsewhere}
  if of_work_dir.exists() and json.loads(of_work_dir.read_text()) != settings:
    parser.error(f'--work_dir={args.work_dir} is of {of_work_dir.read_text()}: give another')
  of_work_dir.write_text(json.dumps(settings))
  settings['fits'] = args.fits or args.folds
  rows = read_json(args.json)
  for name in args.parts:
    key = {'part': name, 'settings': settings}
    done = {row['head'] for row in rows if key.items() <= row.items()}
    if not done.issuperset(args.heads):
      rows += [row for row in measure(name, args, settings) if row['head'] not in done]
      write_json(args.json, rows)
  columns = ['part', 'test', 'head', 'nll', 'kl', 'precision_at_1']
  columns += ['to_det', 'to_det_stderr', 'to_det_stderr_folds', 'to_det_extreme']
  print_table(columns, [[row[column] for column in columns] for row in rows])


if __name__ == '__main__':
  main()
