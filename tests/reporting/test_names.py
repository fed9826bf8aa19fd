"""Names that users choose may hold anything."""

import numpy as np

from het_plugin import reporting

NAME = r'$\frac{$ <b>'


def test_a_name_is_never_mathematics():
  curve = {'step': [1, 2], 'loss': [100.0, 1.0]}
  assert reporting.curves_png({NAME: curve}, dpi=20)
  assert reporting.shots_png({NAME: {NAME: {1: (0.5, 0.1), 5: (0.6, None)}}}, dpi=20)
  assert reporting.lines_png(
    {NAME: ([1, 2], [1, 2]), 'b': ([1, 2], [1, 100])}, xlabel=NAME, ylabel='y', log_y=True, dpi=20
  )
  assert reporting.scatter_png({NAME: ([1], [2])}, [NAME], xlabel='x', ylabel='y', dpi=20)
  unit = np.linspace(0, 1, 3)
  assert reporting.unit_curves_png({NAME: (unit, unit)}, title=NAME, x_label='x', y_label='y')
  panel = reporting.CovariancePanel(
    np.zeros((4, 4, 1)), NAME, [NAME, 'b'], np.full(2, 0.5), np.eye(2), NAME, [(NAME, 0.1)]
  )
  assert reporting.covariance_png(panel, dpi=20)
  images = np.zeros((1, 4, 4, 1))
  assert reporting.examples_png(images, [NAME], {NAME: [(NAME, 0.5, True)]}, dpi=20)
