"""Settings of fits: of one, and of heads that are compared over a grid."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from het_plugin.system import ranges
from het_plugin.system.flag_values import NO_FLAG, Head, OneOf
from het_plugin.system.ranges import NOT_EMPTY, Count, NotNegative, Positive

ROUNDS = 10  # of an audit
# Of its fits of DET. 20,000 rows of 100 classes had the order of tol=1e-4 (their ranks correlate by
# 0.9998) after 0.75 of the time; with 1e-3 by 0.994.
DET_TOL = 3e-4
_Settings = TypeVar('_Settings', 'FitSettings', 'Grid', 'GridSettings')

# scikit-learn reads the parameters of an estimator from the signature of `__init__`. It compares
# and prints estimators itself.
estimator = dataclasses.dataclass(eq=False, repr=False, kw_only=True)


@estimator
class FitSettings:
  """Settings of a fit, which are parameters of the estimators: see `DetClassifier`."""

  C: Annotated[float, '(0, inf]'] = dataclasses.field(default=1.0, kw_only=False)
  tol: Positive = 1e-4
  max_iter: Count = 500
  solver: Literal['auto', 'lbfgs', 'streamed'] = 'auto'
  mesh: Sequence[int] | None = None
  validation_fraction: Annotated[float, '(0, 1)'] = 0.1
  progress: bool | str = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
  """Fits to folds of rows over a grid, from which held-out labels choose (`probe.choose`).

  If there are several values of C_noise, 0 (no noise) is one of them. 'auto', alone, is no grid:
  every fit chooses on rows of its own (`HetClassifier`).

  Attributes:
    C: Inverse strength of the regularisation, as in scikit-learn.
    C_noise: Inverse strength of the regularisation of the noise; auto: every fit chooses it.
    num_factors: R, for heads with noise.
    folds: Folds of the training rows.
    max_iter: Largest number of iterations of a fit.
    seed: Seed of the folds and of the initial values.
  """

  C: Annotated[tuple[Positive, ...], NOT_EMPTY] = (1,)
  C_noise: Annotated[tuple[NotNegative | Literal['auto'] | None, ...], NOT_EMPTY] = ('auto',)
  num_factors: Annotated[tuple[Count, ...], NOT_EMPTY] = (8,)
  folds: Annotated[int, '[2, inf)'] = 5
  max_iter: Count = 500
  seed: Annotated[int, '[0, inf)'] = 0

  def __post_init__(self):
    ranges.check_flags(self)
    if 'auto' in self.C_noise and len(self.C_noise) > 1:
      raise ValueError(
        f'--C_noise={",".join(map(str, self.C_noise))}: auto chooses from values of its own, and '
        'must be the only one'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridSettings(Grid):
  """What heads are fitted with, and how they are compared.

  Attributes:
    heads: Heads to fit: det, het, het_h, het_xl.
    baseline: The head to compare with. Default: the first.
    tau: Temperatures: numbers, learned or validation.
    hidden_layers: Widths of layers below the heads. Default: none.
    validation: Share of the training rows that chooses from a grid.
    num_samples: S, for a softmax with noise.
    tol: A fit ends when its gradient is this small.
    target: votes: the labels of a row are votes.
    mesh: DATA,MODEL: devices that split rows and classes.
    solver: of the estimators.
    progress: whether each fit longer than two seconds shows how far it is: a bar on a terminal,
      elsewhere a line every ten seconds.
  """

  heads: Annotated[tuple[Head, ...], NOT_EMPTY] = dataclasses.field(
    default=('det', 'het_xl'), kw_only=False
  )
  baseline: str | None = None
  tau: Annotated[tuple[Positive | Literal['learned', 'validation'], ...], NOT_EMPTY] = (1,)
  hidden_layers: tuple[Count, ...] = ()
  validation: Annotated[float, '(0, 1)'] = 0.1
  num_samples: Count = 64
  tol: Positive = 1e-4
  target: Annotated[str, OneOf(('auto', 'votes'))] = 'auto'  # and what labels with weights are
  mesh: tuple[Count, Count] | None = None
  solver: str = dataclasses.field(default='auto', metadata=NO_FLAG)
  progress: bool = dataclasses.field(default=True, metadata=NO_FLAG)

  def __post_init__(self):
    super().__post_init__()
    if len(set(self.heads)) < len(self.heads):
      raise ValueError(f'--heads={",".join(self.heads)} must name each head once')
    if self.baseline is not None and self.baseline not in self.heads:
      raise ValueError(f'--baseline={self.baseline} must be one of --heads={",".join(self.heads)}')

  def grid(self, head: str) -> list[dict[str, Any]]:
    """Settings of the estimator at each point of the grid."""
    points = [{'C': c, 'tau': tau} for c, tau in itertools.product(self.C, self.tau)]
    if head == 'det':
      return points
    c_noise = self.C_noise
    if len(c_noise) > 1 and 0.0 not in c_noise:
      c_noise = (0.0, *c_noise)
    return [
      {**point, 'C_noise': c, 'num_factors': r, 'num_samples': self.num_samples}
      for point, c, r in itertools.product(points, c_noise, self.num_factors)
    ]


def part(settings: Any, kind: type[_Settings]) -> _Settings:
  """The settings of a kind, from an object that has more."""
  return kind(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(kind)})
