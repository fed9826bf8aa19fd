"""People's words for colours: what heads gain over DET, and which names vary together.

    python -m studies.colours.colour_names --data=DIR --json=rows.json [--dims=4,8,16] [--hidden=64]
    python -m studies.colours.colour_names --data=DIR --heads=het_xl --dims=8 --plot=colours.png

DIR has colour_names.npz: 2,677,400 answers of the XKCD colour survey for 8,325 colours and 153
names, as C3 aggregates them (Heer and Stone 2012, https://github.com/uwdata/c3): lab [N, 3],
name [K], and sparse counts (row, name_id, count). The features of a colour are D random Fourier
features of its place in CIELAB. A colour counts by its answers; --answers draws so many of them.

C = C_noise = 1,000, R = 4 and S = 16. Each head is fitted to half of the colours and scored on the
other half, and then the other way round. nll is in nats per answer, difference that to DET with the
same D, hidden layer and answers, ± error over colours. extreme is the share of the most extreme 1%
of the colours in it. gradient and gap are the larger ones of the two fits at their ends; gap is how
far the objective may be above its optimum, and converged whether both fits have ended there. price
is that of the noise (`probe.price`) per answer. predicted is the gain per answer that the noise
test expects, ± predicted_error; in the rows of det it is that of a hidden layer. The fits of the
test count every colour once.

The row `answers` is a ceiling that no prediction reaches: the entropy of the answers of each
colour, which knows them. C3 has no names with one answer, so the usual estimates of the part of
chance in it do not apply.

--plot fits the first of --heads above the first of --dims to all answers. It draws held-out colours
with people's names and what DET and the head predict, and prints the names that vary together. The
colours are those at quantiles of the gain, so they are not the best ones.
"""

from pathlib import Path

import numpy as np
from sklearn.model_selection import KFold

from benchmarks import probe
from benchmarks.command_line import (
  integers,
  make_parser,
  names,
  print_table,
  read_json,
  report,
  write_json,
)
from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators.noise_gain import HIDDEN, noise_test
from het_plugin.estimators.probe import num_noise_params, price
from het_plugin.measures.comparison import extreme_share
from het_plugin.measures.uncertainty import stderr
from het_plugin.reporting import style

C = 1000.0
NOISE = {'C_noise': C, 'num_factors': 4, 'num_samples': 16}
KEY = ('head', 'd', 'hidden', 'n', 'max_iter')
MIN_ANSWERS = 500  # of a colour of the picture: people's shares are then known to 0.02
QUANTILES = (0.99, 0.75, 0.5, 0.25, 0.01)
LETTER = 0.0105  # the width of a letter, as a share: a name is written where it fits
NUM_PAIRS = 8


def read(folder, num_answers, num_colours):
  """Places in CIELAB [N, 3], counts of answers [N, K], and the names [K]."""
  with np.load(folder / 'colour_names.npz') as file:
    lab = file['lab'].astype(np.float32)
    name = file['name']
    counts = np.zeros((len(lab), len(name)))
    counts[file['row'], file['name_id']] = file['count']
  if num_answers:
    drawn = np.random.default_rng(0).multinomial(num_answers, counts.ravel() / counts.sum())
    counts = drawn.reshape(counts.shape).astype(float)
  if num_colours:
    chosen = np.random.default_rng(0).choice(len(lab), num_colours, replace=False)
    lab = lab[chosen]
    counts = counts[chosen]
  return lab, counts, name


def fourier_features(lab, dim):
  """[N, D] random Fourier features, of a scale of 50 units of CIELAB."""
  rng = np.random.default_rng(0)
  phase = lab / 50.0 @ rng.normal(size=(3, dim)) + rng.uniform(0, 2 * np.pi, dim)
  return (np.sqrt(2.0) * np.cos(phase)).astype(np.float32)


def fit_halves(heads, x, counts, hidden, max_iter):
  """For DET and each head two (held-out rows, estimator, converged, CPU seconds)."""
  totals, shares = totals_and_shares(counts)
  settings = {'C': C, 'target': 'probabilities', 'max_iter': max_iter, 'tol': 1e-3}
  settings['hidden_layers'] = (hidden,) if hidden else ()
  found = {}
  for fitted, held_out in KFold(2, shuffle=True, random_state=0).split(x):
    fitted = fitted[totals[fitted] > 0]
    weight = totals[fitted] / totals[fitted].mean()
    for head in dict.fromkeys(('det', *heads)):
      noise, of_det = ({}, {}) if head == 'det' else (NOISE, {'start': found['det'][-1][1]})
      estimator = CLASSIFIERS[head](**settings, **noise)
      rows = x[fitted], shares[fitted]
      row = held_out, *probe.fitted(estimator, *rows, sample_weight=weight, **of_det)
      found.setdefault(head, []).append(row)
  return found


def totals_and_shares(counts):
  """Answers of each colour [N], and the shares of the names among them [N, K]."""
  totals = counts.sum(axis=1)
  return totals, counts / np.maximum(totals, 1.0)[:, None]


def held_out_prob(halves, x):
  """p [N, K] of fits to the other half."""
  p = np.zeros((len(x), len(halves[0][1].classes_)))
  for held_out, estimator, _, _ in halves:
    p[held_out] = estimator.predict_proba(x[held_out])
  return p


def cross_entropy(shares, p):
  """NLL [N] per answer."""
  return -(shares * np.log(np.maximum(p, 1e-30))).sum(axis=1)


def measure(heads, x, counts, hidden, max_iter):
  """A row for DET, each head and the ceiling."""
  totals, shares = totals_and_shares(counts)
  found = fit_halves(heads, x, counts, hidden, max_iter)
  noisy = [head for head in heads if head != 'det']
  predicted = {}
  if not hidden and noisy:
    of_test = {'heads': noisy, 'C': C, 'num_factors': 4, 'progress': False}
    test = noise_test(x[totals > 0], shares[totals > 0], **of_test)
    answers = totals[totals > 0] / totals[totals > 0].mean()
    predicted = {tested.name: answers * tested.gain for tested in test.tested}  # per answer
  weight = totals / totals.mean()
  rows = []
  of_heads = {head: cross_entropy(shares, held_out_prob(of, x)) for head, of in found.items()}
  nll_det = of_heads['det']

  def add(head, nll, **about):
    gap = weight * (nll - nll_det)
    gain = predicted.get(HIDDEN if head == 'det' else head)
    rows.append(
      {
        'head': head,
        'd': x.shape[1],
        'hidden': hidden,
        'n': int(totals.sum()),
        'max_iter': max_iter,
        'nll': float((weight * nll).mean()),
        'nll_det': float((weight * nll_det).mean()),
        'difference': float(gap.mean()),
        'error': stderr(gap) or 0.0,
        'extreme': extreme_share(gap) if gap.any() else None,
        **{x: about.get(x) for x in ('gradient', 'gap', 'converged', 'cpu_seconds', 'price')},
        'predicted': None if gain is None else float(gain.mean()),
        'predicted_error': None if gain is None else stderr(gain),
      }
    )

  for head, halves in found.items():
    _, estimators, converged, seconds = zip(*halves, strict=True)
    add(
      head,
      of_heads[head],
      gradient=max(x.gradient_ for x in estimators),
      gap=max(x.gap_ for x in estimators),
      converged=all(converged),
      cpu_seconds=sum(seconds),
      price=price(num_noise_params(estimators[0]), totals.sum() / 2),  # half of them are fitted
    )
  add('answers', cross_entropy(shares, shares))
  return rows


def covariance_of_shares(halves, x, weight):
  """Covariance [K, K] of the shares of names that the noise gives, a mean over held-out colours.

  Noise dz of the logits over tau moves p_i by p_i (dz_i - p . dz), to the first order.
  """
  total = 0.0
  for held_out, estimator, _, _ in halves:
    for rows in np.array_split(held_out, -(-len(held_out) // 256)):
      p = estimator.predict_proba(x[rows])
      sigma = estimator.covariance(x[rows])
      change = p[:, :, None] * (np.eye(p.shape[1]) - p[:, None, :])  # [n, K, K]
      total = total + np.einsum(
        'n,nkl->kl', weight[rows], change @ sigma @ change.transpose(0, 2, 1)
      )
  return total / weight.sum()


def print_pairs(covariance, name):
  """The pairs that add most to the variance, by sign."""
  size = np.sqrt(np.diagonal(covariance))
  first, second = np.triu_indices(len(name), 1)
  pairs = covariance[first, second]
  order = np.argsort(pairs)
  for title, chosen in (('together', order[::-1]), ('apart', order)):
    print(f'Names that vary {title}:')
    rows = [
      [name[first[i]], name[second[i]], pairs[i] / size[first[i]] / size[second[i]]]
      for i in chosen[:NUM_PAIRS]
    ]
    print_table(['name', 'name', 'correlation'], rows)


def rgb(lab):
  """sRGB [..., 3] in [0, 1] of CIELAB with the white point D65 (IEC 61966-2-1)."""
  light = (lab[..., 0] + 16.0) / 116.0
  f = np.stack([light + lab[..., 1] / 500.0, light, light - lab[..., 2] / 200.0], axis=-1)
  xyz = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * (0.95047, 1.0, 1.08883)
  to_rgb = [[3.2406, -1.5372, -0.4986], [-0.9689, 1.8758, 0.0415], [0.0557, -0.2040, 1.0570]]
  linear = np.clip(xyz @ np.transpose(to_rgb), 0.0, 1.0)
  return np.where(linear > 0.0031308, 1.055 * linear ** (1 / 2.4) - 0.055, 12.92 * linear)


def draw(path, titles, probs, lab, counts, name):
  """Draws colours at quantiles of the gain of the second of two p [N, K] over the first."""
  totals, shares = totals_and_shares(counts)
  gain = cross_entropy(shares, probs[0]) - cross_entropy(shares, probs[1])
  many = np.flatnonzero(totals >= MIN_ANSWERS)
  order = many[np.argsort(-gain[many])]
  of_name = rgb(counts.T @ lab / np.maximum(counts.sum(axis=0), 1.0)[:, None])  # [K, 3]
  figure = style.new_figure(9.6, 0.4 + 0.67 * len(QUANTILES))
  ax = figure.subplots()
  for i, quantile in enumerate(QUANTILES):
    colour = order[round((1 - quantile) * (len(order) - 1))]
    ax.barh(i, 0.12, 0.8, -0.22, color=rgb(lab[colour]))
    ax.text(1.01, i, f'{gain[colour]:+.3f}', va='center', fontsize=8)
    by_share = np.argsort(-shares[colour])
    for place, title, of in zip(
      (-0.27, 0, 0.27), ('people', *titles), (shares, *probs), strict=True
    ):
      p = of[colour, by_share]
      left = np.cumsum(p) - p
      ax.barh(i + place, p, 0.25, left, color=of_name[by_share], edgecolor='white', linewidth=0.3)
      ax.text(-0.01, i + place, title, ha='right', va='center', fontsize=7)
      for k in (k for k, i in enumerate(by_share) if p[k] >= LETTER * (1 + len(name[i]))):
        light = of_name[by_share[k]] @ (0.3, 0.6, 0.1) > 0.5
        about = {'ha': 'center', 'va': 'center', 'color': 'black' if light else 'white'}
        ax.text(left[k] + p[k] / 2, i + place, name[by_share[k]], fontsize=7, **about)
  ax.text(1.01, -0.75, f'gain of {titles[1]}, nats', ha='center', fontsize=8)
  ax.set(xlim=(-0.22, 1.08), ylim=(len(QUANTILES) - 0.4, -0.9))
  ax.axis('off')
  path.write_bytes(style.to_png(figure, dpi=130))


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--data', type=Path, required=True, help='folder of colour_names.npz')
  heads = [head for head in CLASSIFIERS if head != 'det']
  parser.add_argument('--heads', type=names(CLASSIFIERS), default=heads, help=','.join(CLASSIFIERS))
  parser.add_argument('--dims', type=integers, default=[4, 8, 16], help='D')
  parser.add_argument('--hidden', type=int, default=0, help='width of a hidden layer; 0 for none')
  parser.add_argument('--answers', type=int, default=0, help='number of answers; 0 for all')
  parser.add_argument('--colours', type=int, default=0, help='number of colours; 0 for all')
  parser.add_argument('--max_iter', type=int, default=1500, help='of a fit')
  parser.add_argument('--plot', type=Path, help='draw colours of one fit here, and add no rows')
  args = parser.parse_args()
  lab, counts, name = read(args.data, args.answers, args.colours)
  if args.plot:
    head = args.heads[0]
    x = fourier_features(lab, args.dims[0])
    found = fit_halves([head], x, counts, args.hidden, args.max_iter)
    probs = [held_out_prob(found[which], x) for which in ('det', head)]
    draw(args.plot, ('DET', head.upper().replace('_', '-')), probs, lab, counts, name)
    print_pairs(covariance_of_shares(found[head], x, counts.sum(axis=1)), name)
    return
  rows = read_json(args.json)
  for dim in args.dims:
    done = {tuple(row[x] for x in KEY) for row in rows}
    about = dim, args.hidden, int(counts.sum()), args.max_iter
    heads = [head for head in args.heads if (head, *about) not in done]
    if heads:
      x = fourier_features(lab, dim)
      found = measure(heads, x, counts, args.hidden, args.max_iter)
      fresh = {tuple(row[x] for x in KEY) for row in found}
      rows = [row for row in rows if tuple(row[x] for x in KEY) not in fresh] + found
      write_json(args.json, rows)
  report(args.json, rows)


if __name__ == '__main__':
  main()
