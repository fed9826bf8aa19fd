"""People's words for colours: what heads gain over DET, and what the noise test says before.

    python benchmarks/colour_names.py --data=DIR --json=rows.json [--dims=4,8,16] [--hidden=64]

DIR has colour_names.npz: 2,677,400 answers of the XKCD colour survey for 8,325 colours and 153
names, as C3 aggregates them (Heer and Stone 2012, https://github.com/uwdata/c3): lab [N, 3],
name [K], and sparse counts (row, name_id, count). The features of a colour are D random Fourier
features of its place in CIELAB. A colour counts by its answers; `--answers` draws so many of them.

C = C_noise = 1,000, R = 4 and S = 16. Each head is fitted to half of the colours and scored on the
other half, and then the other way round. nll is in nats per answer, difference that to DET with the
same D, hidden layer and answers, ± error over colours, and gradient the larger of the two fits'
at their ends. `predicted` is the gain that the noise test expects, ± `predicted_error`; in the rows
of det it is that of a hidden layer.
"""

import json
import time
import warnings
from pathlib import Path

import numpy as np
from command_line import integers, make_parser, names, print_table, write_json
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold

from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators.noise_test import HIDDEN, noise_test
from het_plugin.measures.uncertainty import stderr

C = 1000.0
NOISE = {'C_noise': C, 'num_factors': 4, 'num_samples': 16}
KEY = ('head', 'd', 'hidden', 'n')


def read(folder, num_answers, rng):
  """Places in CIELAB [N, 3], and counts of answers [N, K]."""
  with np.load(folder / 'colour_names.npz') as file:
    lab = file['lab'].astype(np.float32)
    counts = np.zeros((len(lab), len(file['name'])))
    counts[file['row'], file['name_id']] = file['count']
  if num_answers:
    drawn = rng.multinomial(num_answers, counts.ravel() / counts.sum())
    counts = drawn.reshape(counts.shape).astype(float)
  return lab, counts


def fourier_features(lab, dim):
  """[N, D] random Fourier features, of a scale of 50 units of CIELAB."""
  rng = np.random.default_rng(0)
  phase = lab / 50.0 @ rng.normal(size=(3, dim)) + rng.uniform(0, 2 * np.pi, dim)
  return (np.sqrt(2.0) * np.cos(phase)).astype(np.float32)


def measure(heads, x, counts, hidden, max_iter):
  """A row for each head."""
  totals = counts.sum(axis=1)
  shares = counts / np.maximum(totals, 1.0)[:, None]
  settings = {'C': C, 'target': 'probabilities', 'max_iter': max_iter, 'tol': 1e-3}
  settings['hidden_layers'] = (hidden,) if hidden else ()
  nll, gradient, seconds = {}, {}, {}
  for fitted, held_out in KFold(2, shuffle=True, random_state=0).split(x):
    fitted = fitted[totals[fitted] > 0]
    weight = totals[fitted] / totals[fitted].mean()
    det = None
    for head in ('det', *heads):
      start = time.process_time()
      fit = CLASSIFIERS[head](**settings, **({} if head == 'det' else NOISE)).fit
      of_fit = x[fitted], shares[fitted]
      with warnings.catch_warnings():
        warnings.simplefilter('ignore', ConvergenceWarning)
        noise_start = {} if head == 'det' else {'start': det}
        estimator = fit(*of_fit, sample_weight=weight, **noise_start)
      det = estimator if head == 'det' else det
      log_p = estimator.predict_log_proba(x[held_out])
      of_held_out = np.zeros(len(x))
      of_held_out[held_out] = -(shares[held_out] * log_p).sum(axis=1)
      nll[head] = nll.get(head, 0.0) + of_held_out
      gradient[head] = max(gradient.get(head, 0.0), estimator.gradient_)
      seconds[head] = seconds.get(head, 0.0) + time.process_time() - start
  predicted = {}
  if not hidden:
    test = noise_test(
      x[totals > 0], shares[totals > 0], heads=heads, C=C, num_factors=4, progress=False
    )
    predicted = {tested.name: tested.row() for tested in test.tested}
  weight = totals / totals.mean()
  rows = []
  for head in nll:
    gap = weight * (nll[head] - nll['det'])
    rows.append(
      {
        **{'head': head, 'd': x.shape[1], 'hidden': hidden, 'n': int(totals.sum())},
        **{
          'nll': float((weight * nll[head]).mean()),
          'nll_det': float((weight * nll['det']).mean()),
        },
        **{'difference': float(gap.mean()), 'error': stderr(gap) or 0.0},
        **{'gradient': gradient[head], 'cpu_seconds': seconds[head]},
        'predicted': (of := predicted.get(HIDDEN if head == 'det' else head, {})).get('gain'),
        'predicted_error': of.get('stderr'),
      }
    )
  return rows


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--data', type=Path, required=True, help='folder of colour_names.npz')
  heads = tuple(head for head in CLASSIFIERS if head != 'det')
  parser.add_argument('--heads', type=names(heads), default=list(heads), help=','.join(heads))
  parser.add_argument('--dims', type=integers, default=[4, 8, 16], help='D')
  parser.add_argument('--hidden', type=int, default=0, help='width of a hidden layer; 0 for none')
  parser.add_argument('--answers', type=int, default=0, help='number of answers; 0 for all')
  parser.add_argument('--colours', type=int, default=0, help='number of colours; 0 for all')
  parser.add_argument('--max_iter', type=int, default=1500, help='of a fit')
  args = parser.parse_args()
  rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
  lab, counts = read(args.data, args.answers, np.random.default_rng(0))
  if args.colours:
    chosen = np.random.default_rng(0).choice(len(lab), args.colours, replace=False)
    lab, counts = lab[chosen], counts[chosen]
  for dim in args.dims:
    done = {tuple(row[x] for x in KEY) for row in rows}
    about = dim, args.hidden, int(counts.sum())
    heads = [head for head in args.heads if (head, *about) not in done]
    if heads:
      x = fourier_features(lab, dim)
      found = measure(heads, x, counts, args.hidden, args.max_iter)
      rows += [row for row in found if tuple(row[x] for x in KEY) not in done]
      write_json(args.json, rows)
  print_table(list(rows[0]), [list(row.values()) for row in rows])


if __name__ == '__main__':
  main()
