"""How far the analytic estimators are off: against 100,000 samples, or the exact sigmoid.

    python benchmarks/analytic_bias.py [--json OUT]

Bias (mean error) and RMSE of log p(y | x) over examples and labels y ~ p(y | x), for both links and
three sizes of the noise, beside `location` (the noise left out) and independent samples. Takes 10
seconds on two CPU cores; a few with --classes 20 --factors 4 --reference_samples 2000.
"""

import dataclasses

import jax
from command_line import make_parser, print_table, write_json
from gaussian_problem import (
  NOISE,
  add_flags,
  expectation,
  keys_of,
  make_logits,
  problem_line,
  reference_log_prob,
  rmse,
)

from het_plugin.integrate import ESTIMATORS, LINKS, Analytic, Integrator


@dataclasses.dataclass(frozen=True)
class WithoutNoise:
  """link(location): what a predictor that forgets the noise would say."""

  def log_prob(self, logits, keys):
    return Integrator().log_prob(logits.replace(covariance=None, projection=None), keys)


ESTIMATES = (
  {'location': WithoutNoise()}
  | {name: Analytic(name) for name in ESTIMATORS}
  | {f'iid S={s}': Integrator(num_samples=s, method='sample') for s in (16, 256)}
)


def measure(args):
  """Rows {link, noise, noise_std, estimator, bias, rmse}."""
  rows = []
  for link in LINKS:
    log_probs = {name: jax.jit(estimate.log_prob) for name, estimate in ESTIMATES.items()}
    for noise, std in NOISE.items():
      logits = make_logits(args, std, link)
      reference = reference_log_prob(args, logits)
      for name, log_prob in log_probs.items():
        error = log_prob(logits, keys_of(args, 0)) - reference
        rows.append(
          dict(
            link=link,
            noise=noise,
            noise_std=std,
            estimator=name,
            bias=float(expectation(error, reference, link)),
            rmse=rmse(error, reference, link),
          )
        )
  return rows


def main():
  parser = make_parser(__doc__)
  add_flags(parser)
  args = parser.parse_args()
  rows = measure(args)
  print(f'bias and RMSE of log p(y); {problem_line(args)}')
  print_table(list(rows[0]), [list(row.values()) for row in rows])
  error = {(row['link'], row['noise'], row['estimator']): row['rmse'] for row in rows}
  ratios = {
    name: error['softmax', 'moderate', name] / error['softmax', 'moderate', 'location']
    for name in ESTIMATORS
  }
  print(
    'ratio: RMSE over that of leaving the noise out, softmax, moderate noise: '
    + ', '.join(f'{name} {ratio:.3f}' for name, ratio in ratios.items())
  )
  write_json(args.json, {'rows': rows, 'ratios': ratios})


if __name__ == '__main__':
  main()
