"""Principal angles between row spaces: against scipy, and the random control of table 17."""

import math

import numpy as np
import scipy.linalg

from het_plugin.evaluation import row_spaces


def test_the_cosine_is_that_of_scipys_smallest_angle():
  rng = np.random.default_rng(0)
  w, q = rng.standard_normal((6, 40)), rng.standard_normal((4, 40))
  q[1] = q[0]  # of a lower rank
  angles = scipy.linalg.subspace_angles(w.T, q.T)
  got = row_spaces.cosine(row_spaces.basis(w), row_spaces.basis(q))
  assert math.isclose(got, np.cos(angles.min()), rel_tol=1e-12)
  # one common direction is enough
  q[2] = w[0] - 2 * w[3]
  assert math.isclose(row_spaces.cosine(row_spaces.basis(w), row_spaces.basis(q)), 1.0)
  assert row_spaces.cosine(np.eye(6)[:3], np.eye(6)[3:]) == 0.0


def test_a_random_draw_has_the_law_of_a_random_kernel():
  rng = np.random.default_rng(1)
  draws = [row_spaces.random_cosine(rng, 12, 3, 80) for _ in range(300)]
  q_basis = row_spaces.basis(rng.standard_normal((3, 80)))
  direct = [
    row_spaces.cosine(row_spaces.basis(rng.standard_normal((12, 80))), q_basis) for _ in range(300)
  ]
  error = math.hypot(np.std(draws), np.std(direct)) / math.sqrt(300)
  assert abs(np.mean(draws) - np.mean(direct)) < 4 * error


def test_the_random_control_is_the_papers():
  """0.350 +- 0.002 (standard deviation over validation, of one W), with ResNet152x1 (D = 2048,
  R = 50, so 51 factors) on ImageNet-21k. Draws of W deviate by as much.
  """
  rng = np.random.default_rng(2)
  draws = [row_spaces.random_cosine(rng, 2048, 51, 21_843) for _ in range(4)]
  assert abs(np.mean(draws) - 0.350) < 2 * 0.002
  assert np.std(draws) < 0.002
