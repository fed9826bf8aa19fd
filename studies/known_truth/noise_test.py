"""Gains that the noise test predicts for heads, compared with the gains of their fits.

    python -m studies.known_truth.noise_test --json=ROWS.json [--max_size=3e5] [--plot=PNG]

The problems are those of known_truth.py and noisy_labels.py whose fits are among the results of
these studies (the first seed), with K N up to --max_size and at least 2,000 rows. The test sees the
rows that the heads were fitted to, and DET's C. `predicted` is its gain over folds of these rows, ±
`stderr`; `measured` is the gain over DET of the fit whose regularisation held-out rows chose, on
test rows. Of a hidden layer, the test has 64 random units and the fit 64 learned ones. Prints rank
correlations, and the slope of measured by predicted through the origin. Rows that --json already
has are not measured again.
"""

import time
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.command_line import make_parser, print_table, read_json, write_json
from het_plugin.estimators.noise_gain import HIDDEN, noise_test
from het_plugin.reporting import style
from studies.known_truth import known_truth
from studies.noisy_labels import noisy_labels

STUDIES = Path(__file__).parents[1]
MIN_ROWS = 2000
HEADS = 'het', 'het_h', 'het_xl'


def of_known_truth():
  """(problem, measured gains by head, C of DET, K N, the rows) of each."""
  found = {}
  for row in read_json(STUDIES / 'known_truth/results/known_truth.json'):
    if row['seed'] == 0 and row['head'] in ('det', *HEADS):
      found.setdefault(tuple(row[x] for x in known_truth.KEY if x != 'head'), []).append(row)
  for (truth, *settings), rows in found.items():
    gains = {row['head']: row['gain'] for row in rows if row['head'] != 'det'}
    problem = known_truth.Problem(*settings)
    c = next(row['c'] for row in rows if row['head'] == 'det')
    size = problem.k * problem.n, problem.k

    def draw(problem=problem, truth=truth):
      return known_truth.draw_problem(problem, truth, 0)[2]

    yield ','.join(map(str, (truth, *settings))), gains, c, size, draw


def of_noisy_labels():
  found = {}
  for row in read_json(STUDIES / 'noisy_labels/results/noisy_labels.json'):
    if row['seed'] == 0 and row['kind'] in noisy_labels.KINDS:
      of_problem = found.setdefault(tuple(row[x] for x in noisy_labels.POINT), {})
      of_problem[row['head']] = row
  for settings, rows in found.items():
    names = {**{head: head for head in HEADS}, 'hidden': HIDDEN}
    of_det = rows['det']['nll']
    gains = {names[x]: of_det - row['nll'] for x, row in rows.items() if x in names}
    problem = noisy_labels.Problem(*settings)

    def draw(problem=problem):
      data = noisy_labels.draw(problem, 0)
      return data.x[0], data.y[0]

    size = problem.n, problem.k
    yield ','.join(map(str, settings)), gains, rows['det']['chosen']['C'], size, draw


SOURCES = {'known_truth': of_known_truth, 'noisy_labels': of_noisy_labels}


def summary(rows):
  """Rank correlation, slope through the origin, and the number of rows."""
  predicted, measured = (np.array([row[x] for row in rows]) for x in ('predicted', 'measured'))
  slope = float(predicted @ measured / max(predicted @ predicted, 1e-12))
  varies = len(rows) > 2 and np.ptp(predicted) and np.ptp(measured)
  rank = float(stats.spearmanr(predicted, measured).statistic) if varies else None
  return {'rows': len(rows), 'rank_correlation': rank, 'slope': slope}


def plot(path, rows):
  """Draws measured by predicted gains, on axes that are linear below 0.001 nats."""
  figure = style.new_figure(6.4, 4.0)
  ax = figure.subplots()
  for source, (color, _) in style.line_styles(SOURCES).items():
    of_source = [row for row in rows if row['source'] == source]
    columns = ([row[x] for row in of_source] for x in ('predicted', 'measured', 'stderr'))
    predicted, measured, errors = columns
    label = source.replace('_', ' ')
    bars = known_truth.ERROR_BARS
    ax.errorbar(predicted, measured, None, errors, fmt='o', color=color, label=label, **bars)
  for axis in (ax.set_xscale, ax.set_yscale):
    axis('symlog', linthresh=1e-3)
  ax.axline((0, 0), (0.1, 0.1), color='#999999', linewidth=1)
  ax.set_xlabel('gain that the test predicts (nats)')
  ax.set_ylabel('gain of the fit (nats)')
  ax.legend(fontsize=8)
  style.plain_axes(ax, 'both')
  path.write_bytes(style.to_png(figure, dpi=130))


def main():
  parser = make_parser(__doc__)
  parser.add_argument('--max_size', type=float, default=3e5, help='largest K N of a problem')
  parser.add_argument('--folds', type=int, default=5)
  parser.add_argument('--only', default='', help='how the name of a problem starts')
  parser.add_argument('--plot', type=Path, help='draw the points here')
  args = parser.parse_args()
  rows = read_json(args.json)
  done = {(row['source'], row['problem'], row['folds']) for row in rows}
  for source, problems in SOURCES.items():
    for problem, gains, c, (n, k), draw in problems():
      if n < MIN_ROWS or n * k > args.max_size or not problem.startswith(args.only):
        continue
      if (source, problem, args.folds) in done:
        continue
      start = time.process_time()
      heads = [head for head in gains if head in HEADS]
      found = noise_test(*draw(), heads=heads, C=c, folds=args.folds, progress=False)
      seconds = time.process_time() - start
      for tested in found.tested:
        row = tested.row()
        if tested.name in gains:
          about = {'source': source, 'problem': problem, 'head': tested.name, 'folds': args.folds}
          of_test = {'predicted': row['gain'], 'stderr': row['stderr'] or 0.0}
          measured = {'measured': gains[tested.name], 'price': row['price'], 'seconds': seconds}
          rows.append(about | of_test | {'constant': row.get('constant')} | measured)
          print(
            source, problem, tested.name, f'{row["gain"]:.4f} {gains[tested.name]:.4f}', flush=True
          )
      write_json(args.json, rows)
  rows = [row for row in rows if row['folds'] == args.folds]
  if not rows:
    parser.error(f'--only={args.only} and --max_size={args.max_size:g} leave no problem')
  groups = {source: [row for row in rows if row['source'] == source] for source in SOURCES}
  groups |= {head: [row for row in rows if row['head'] == head] for head in (*HEADS, HIDDEN)}
  sums = {'all': summary(rows), **{name: summary(x) for name, x in groups.items() if x}}
  print_table(['', *sums['all']], [[name, *of.values()] for name, of in sums.items()])
  if args.plot:
    plot(args.plot, rows)
  print(f'fits gained {sums["all"]["slope"]:.2f} times what the test predicted')


if __name__ == '__main__':
  main()
