"""Figure of docs/integrator.md: where the samples of a loss go, without and with the tilt.

    python -m studies.samples.tilt docs/figures/tilt.svg

Three classes whose logits depend on a noise z of two dimensions, and a label that z = 0 makes
improbable. Grey is the noise, N(0, I); blue is the noise that explains the label, which is
proportional to N(z; 0, I) p(label | z). The points of the right panel follow N(m, I), the closest
such Gaussian. Both panels have the same Sobol points.
"""

import argparse

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax
from scipy.stats import norm, qmc

from het_plugin.reporting import style

LOCATION = np.array([1.5, 0.5, -2.0])  # [K]
FACTORS = np.array([[-1.8, 0.2, 1.4], [0.3, -2.0, 0.8]])  # [R, K]
LABEL = 2
POINTS = 16
EDGE = 4.0


def log_likelihood(z):
  """log p(label | z) for z [..., R]."""
  return log_softmax(LOCATION + z @ FACTORS, axis=-1)[..., LABEL]


def fit():
  """m [R] of the N(m, I) that is closest to the noise that explains the label."""
  x = norm.ppf(qmc.Sobol(2, seed=1).random(256))  # [N, R]
  return minimize(lambda m: m @ m / 2 - log_likelihood(m + x).mean(), np.zeros(2)).x


def draw():
  figure = style.new_figure(7.2, 3.6)
  plain, tilted = figure.subplots(1, 2, sharex=True, sharey=True)
  uniform = qmc.Sobol(2, seed=0).random(POINTS)
  points = norm.ppf(uniform)  # [S, R]
  line = np.linspace(-EDGE, EDGE, 81)
  grid = np.stack(np.meshgrid(line, line), axis=-1)  # [N, N, R]
  noise = np.exp(-(grid**2).sum(-1) / 2)
  explains = noise * np.exp(log_likelihood(grid))
  panels = (
    (plain, points, 'Without the tilt'),
    (tilted, fit() + points, 'With the tilt'),
  )
  grey, _ = style.STYLES[0]
  blue, _ = style.STYLES[2]
  levels = np.exp([-4.5, -2.0, -0.5])  # at 3, 2 and 1 standard deviations
  for ax, where, title in panels:
    ax.contour(line, line, noise, levels=levels, colors=grey, linewidths=0.8, linestyles='dotted')
    for level in levels * explains.max():
      ax.contourf(line, line, explains, levels=[level, np.inf], colors=blue, alpha=0.2)
    ax.plot(*where.T, 'o', color=grey, markersize=4)
    ax.set(title=title, aspect='equal', xticks=[0], yticks=[0])
  return figure


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('file', help='the SVG file that is written')
  draw().savefig(parser.parse_args().file, metadata={'Date': None})


if __name__ == '__main__':
  main()
