"""Heads on frozen features of published towers, fitted to people's labels and scored by them.

    python -m studies.people.people --data=DIR --towers=hf:facebook/dinov2-small --json=rows.json
    python -m studies.people.people --data=DIR --towers=runs/det,lite0=lite0.npz --parts=cifar10h

A tower is what `represent --checkpoint` takes (hf:OWNER/NAME, a published file, a run of ours), or
NAME=F.npz with `features` [N, D] and `index` [N] of images, as `noisy_labels.imagenet_features`
writes. DIR has cifar10_human.npz.

    cifar10h    the 10,000 test images of CIFAR-10, with the answers of about 51 people each
    cifar10n    training images with the votes of three people each (CIFAR-10N); also scored on the
                test images' 51 people where the tower has their features ('cifar10n, 51 people')

Of each part --rows images are taken. In each of --folds folds the features become --dim whitened
principal components of the rows that are fitted. A fifth of these rows is held out to choose C of
DET, which all heads share, and C of a hidden layer of 64. The noise chooses C_noise itself.

nll is in nats against people's shares. accuracy is that of the published labels; ece compares the
confidence with the share of people who agree. to_det is the paired difference to DET: stderr over
examples, stderr_folds over folds; extreme is the share of it on 1% of the examples. predicted is
what the noise test expects a head to gain, on the rows of the first fold. price is p / (2N) of the
noise. converged counts the folds whose fit ended at its tolerance.

Rows that --json already has are not measured again.
"""

import io
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.model_selection import KFold

from benchmarks import probe
from benchmarks.command_line import make_parser, names, numbers, print_table, read_json, write_json
from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators.noise_gain import HIDDEN, noise_test
from het_plugin.estimators.probe import num_noise_params, price
from het_plugin.measures import uncertainty, votes
from het_plugin.measures.comparison import extreme_share
from het_plugin.rows import read as read_rows

ROOT = Path(__file__).resolve().parents[2]
NUM_TRAIN = 50_000
HEADS = ('det', 'det_tau', 'het', 'het_h', 'het_xl', 'hidden')
NOISE = {'C_noise': 'auto', 'num_factors': 4, 'num_samples': 16}
HIDDEN_LAYER = (64,)
HELD_OUT = 0.2  # of the fitted rows


def people(data):
  """Shares of people's answers [60000, K], and the published labels [60000]."""
  num_classes = data['human_counts'].shape[1]
  of_votes = votes.shares(data['annotators'].astype(np.int32), num_classes)
  counts = data['human_counts'].astype(float)
  shares = np.concatenate([of_votes, counts / counts.sum(axis=1, keepdims=True)])
  return shares, data['label'].astype(int)


def represented(tower, args):
  """Features [N, D] and numbers [N] of images, by `het_plugin.represent`."""
  path = args.work_dir / 'images.npz'
  if not path.exists():
    with np.load(args.data / 'cifar10_human.npz') as data:
      jpeg = data['jpeg'].tobytes()
      ends = data['jpeg_offset']
      label = data['label']
    image = [np.asarray(Image.open(io.BytesIO(jpeg[a:b]))) for a, b in itertools.pairwise(ends)]
    split = np.where(np.arange(len(label)) < NUM_TRAIN, 'train', 'test')
    args.work_dir.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name('unfinished.npz')  # what a kill leaves is not taken for the images
    np.savez(unfinished, image=np.stack(image), label=label, split=split)
    unfinished.rename(path)
  of_tower = args.work_dir / 'towers' / ''.join(x if x.isalnum() else '_' for x in tower)
  splits = ['test', *(['train'] if 'cifar10n' in args.parts else [])]
  flags = [f'--checkpoint={tower}', f'--dataset=npz:{path}', f'--splits={",".join(splits)}']
  flags += [f'--max_examples={args.rows}', f'--output_dir={of_tower}']
  run_represent(flags)
  found = [read_rows(str(of_tower / 'images' / 'pre_logits' / f'{x}.safetensors')) for x in splits]
  first = {'train': 0, 'test': NUM_TRAIN}
  index = [rows.index + first[x] for x, rows in zip(splits, found, strict=True)]
  return np.concatenate([rows.features for rows in found]), np.concatenate(index)


def run_represent(flags):
  command = [sys.executable, '-m', 'het_plugin.represent', *flags]
  subprocess.run(command, cwd=ROOT, check=True)


def components(x, dim):
  """A function from features to `dim` whitened principal components of x [N, D]."""
  mean = x.mean(axis=0)
  values, vectors = np.linalg.eigh(np.cov(x - mean, rowvar=False))
  scale = vectors[:, -dim:] / np.sqrt(np.maximum(values[-dim:], 1e-6 * values[-1]))
  return lambda x: ((x - mean) @ scale).astype(np.float32)


def fit_heads(x, shares, args, seed):
  """{head: `probe.fitted`} of rows x [N, D] and shares [N, K]."""
  settings = {'target': 'probabilities', 'max_iter': args.max_iter, 'random_state': seed}
  held_out = np.random.default_rng(seed).random(len(x)) < HELD_OUT

  def best_c(**layer):
    nll = {}
    for c in args.C:
      det = CLASSIFIERS['det'](c, **settings, **layer)
      tried, *_ = probe.fitted(det, x[~held_out], shares[~held_out])
      nll[c] = tried.nll(x[held_out], shares[held_out]).mean()
    return min(nll, key=nll.__getitem__)

  c = best_c()
  found = {
    'det': probe.fitted(CLASSIFIERS['det'](c, **settings), x, shares),
    'det_tau': probe.fitted(CLASSIFIERS['det'](c, tau='learned', **settings), x, shares),
  }
  for head in (x for x in args.heads if x in ('het', 'het_h', 'het_xl')):
    found[head] = probe.fitted(CLASSIFIERS[head](c, **settings, **NOISE), x, shares)
  if 'hidden' in args.heads:
    layer = {'hidden_layers': HIDDEN_LAYER}
    found['hidden'] = probe.fitted(
      CLASSIFIERS['det'](best_c(**layer), **settings, **layer), x, shares
    )
  return found


class Scores:
  """NLL, whether the published label was predicted, confidence, and the share that agrees: [N]."""

  def __init__(self, estimator, x, shares, label):
    log_p = estimator.predict_log_proba(x)
    best = log_p.argmax(axis=1)
    self.nll = estimator.nll(x, shares)
    self.is_right = best == label
    self.confidence = np.exp(log_p.max(axis=1))
    self.agreeing = shares[np.arange(len(x)), best]


def settings_of(args):
  """Settings that rows have: results of others are others."""
  return {
    'd': args.dim,
    'rows': args.rows,
    'folds': args.folds,
    'grid': args.C,
    'max_iter': args.max_iter,
  }


def measure(tower, part, x, index, args, shares, label):
  """Rows of a part, one for each test and head."""
  of_part = (index < NUM_TRAIN) == (part == 'cifar10n')
  here = np.flatnonzero(of_part)[: args.rows]
  others = np.flatnonzero(~of_part)[: args.rows] if part == 'cifar10n' else here[:0]
  if not len(here):
    raise ValueError(f'{tower} has no image of {part}')
  folds = list(KFold(args.folds, shuffle=True, random_state=0).split(here))
  scores = {}
  fits = {}
  predicted = {}
  for number, (fitted, held_out) in enumerate(folds):
    fitted, held_out = (here[rows] for rows in (fitted, held_out))
    to_components = components(x[fitted], args.dim)
    of_fit = to_components(x[fitted]), shares[index[fitted]]
    found = fit_heads(*of_fit, args, number)
    predicted = predicted or predicted_gains(*of_fit, found)
    tests = {part: held_out, f'{part}, 51 people': others}
    for head, fit_of in found.items():
      fits.setdefault(head, []).append(fit_of)
      for test, rows in tests.items():
        if len(rows):
          of_test = to_components(x[rows]), shares[index[rows]], label[index[rows]]
          scores.setdefault((test, head), []).append(Scores(fit_of[0], *of_test))
    print(f'{tower}, {part}: fold {number + 1} of {args.folds}', flush=True)
  num_fitted = len(folds[0][0])
  rows = []
  for (test, head), of_folds in scores.items():
    gaps = [a.nll - b.nll for a, b in zip(of_folds, scores[test, 'det'], strict=True)]
    # Other images are tested by every fold: their mean is that of an example.
    gap = np.concatenate(gaps) if test == part else np.mean(gaps, axis=0)
    joined = {x: np.concatenate([getattr(of, x) for of in of_folds]) for x in vars(of_folds[0])}
    estimators = [estimator for estimator, *_ in fits[head]]
    gain = predicted.get(head)
    rows.append(
      {
        'tower': tower,
        'part': part,
        'test': test,
        'head': head,
        **settings_of(args),
        'fitted': num_fitted,
        'nll': float(joined['nll'].mean()),
        'accuracy': float(joined['is_right'].mean()),
        'ece': uncertainty.reliability(joined['confidence'], joined['agreeing']).ece,
        'to_det': float(gap.mean()),
        'stderr': uncertainty.stderr(gap) or 0.0,
        'stderr_folds': uncertainty.stderr(np.array([x.mean() for x in gaps])) or 0.0,
        'extreme': extreme_share(gap) if gap.any() else None,
        'predicted': None if gain is None else float(gain.mean()),
        'predicted_stderr': None if gain is None else uncertainty.stderr(gain),
        'price': price(num_noise_params(estimators[0]), num_fitted),
        'c': [x.C for x in estimators],
        'c_noise': [x.C_noise_ for x in estimators],
        'converged': sum(converged for _, converged, _ in fits[head]),
      }
    )
  return rows


def predicted_gains(x, shares, found):
  """{head: what the noise test expects it to gain, [N]}."""
  heads = [head for head in ('het', 'het_h', 'het_xl') if head in found]
  settings = {'C': found['det'][0].C, 'num_factors': NOISE['num_factors'], 'progress': False}
  tested = noise_test(x, shares, heads=heads, target='probabilities', **settings).tested
  gains = {x.name: x.gain for x in tested}
  return gains | {'hidden': gains[HIDDEN]}


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--data', type=Path, required=True, help='folder of cifar10_human.npz')
  parser.add_argument('--towers', type=lambda text: text.split(','), required=True)
  parts = names(('cifar10h', 'cifar10n'))
  parser.add_argument('--parts', type=parts, default=['cifar10h', 'cifar10n'])
  parser.add_argument('--heads', type=names(HEADS), default=HEADS)
  parser.add_argument('--rows', type=int, default=10_000, help='images of a part, at most')
  parser.add_argument('--dim', type=int, default=64, help='components of the features')
  parser.add_argument('--folds', type=int, default=5)
  parser.add_argument('--C', type=numbers, default=[0.001, 0.01, 0.1, 1.0], help='of DET')
  parser.add_argument('--max_iter', type=int, default=500)
  parser.add_argument('--work_dir', type=Path, default=Path('runs/people'))
  args = parser.parse_args()
  if not (args.data / 'cifar10_human.npz').exists():
    parser.error(f'--data={args.data} has no cifar10_human.npz')
  args.work_dir = args.work_dir.absolute()
  rows = read_json(args.json)
  with np.load(args.data / 'cifar10_human.npz') as data:
    shares, label = people(data)
  for tower in args.towers:
    name, equals, path = tower.partition('=')
    parts = []
    for part in args.parts:
      key = {'tower': name, 'part': part, **settings_of(args)}
      done = {row['head'] for row in rows if key.items() <= row.items()}
      if done and (missing := {*args.heads} - done):
        parser.error(f'{args.json} has {name}, {part} without {min(missing)}: name another --json')
      parts += [] if done else [part]
    if not parts:
      continue
    if equals:
      with np.load(path) as file:
        x = file['features'].astype(np.float32)
        index = file['index']
    else:
      x, index = represented(tower, args)
    for part in parts:
      rows += measure(name, part, x, index, args, shares, label)
      write_json(args.json, rows)
  columns = ['tower', 'test', 'head', 'nll', 'accuracy', 'ece', 'to_det', 'stderr', 'stderr_folds']
  columns += ['predicted', 'price', 'converged']
  print_table(columns, [[row[x] for x in columns] for row in rows])


if __name__ == '__main__':
  main()
