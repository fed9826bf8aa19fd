"""What noise would gain over DET, before a head with noise is fitted.

W and the sizes of the noise along the leading directions of `directions` are fitted together, to
the first order in the noise (`first_order`): a logistic regression with few parameters besides W,
without samples. W takes part because noise moves its optimum. The control is a hidden layer to the
same order: W' gelu(A x + c) with random A and c.

DET, directions and sizes are fitted to all folds but the one on which a gain is measured.
"""

import dataclasses
import functools
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold

from het_plugin.estimators import (
  fitting,
  inputs,
  lbfgs,
  objective,
  placement,
  probe,
  selection,
  targets,
)
from het_plugin.estimators.directions import noise_directions, noise_map
from het_plugin.estimators.first_order import FirstOrder
from het_plugin.estimators.model import Model, is_noise
from het_plugin.estimators.starts import det_start
from het_plugin.measures import uncertainty
from het_plugin.measures.comparison import extreme_share
from het_plugin.reporting import Progress

TITLES = {'het': 'HET', 'het_h': 'HET-H', 'het_xl': 'HET-XL'}
HIDDEN = 'hidden layer'
STRENGTHS = 0.03, 0.3  # C_noise / C of noise that depends on x
HIDDEN_STRENGTHS = 0.03, 0.3, 3.0  # the same of the hidden layer
NUM_HIDDEN = 64
MAX_ITER = 60  # of a fit that starts at DET's optimum
FIRST_SIZE = 0.2  # standard deviation of the logits where the sizes start
REFIT_C = 3e-4  # of what is added to W and b of a run: with more, they fitted few rows
FEW = 100  # rows, whose gains and errors say nothing
MAX_ENTRIES = 2**29  # rows times classes that are read


@dataclasses.dataclass(frozen=True, eq=False)
class Tested:
  """One head, or the hidden layer.

  Attributes:
    name: the head, or `HIDDEN`.
    gain: [N] nats by which the NLL of an example falls, at the strength chosen without its fold.
    constant: the same with noise that does not depend on x; None for a hidden layer.
    fold: [N].
    chosen: for each fold 'none', 'constant', or C_noise / C.
    price: nats per example that the parameters of the head's noise cost without regularisation.
  """

  name: str
  gain: np.ndarray
  constant: np.ndarray | None
  fold: np.ndarray
  chosen: Sequence[str]
  price: float | None

  def row(self) -> dict[str, Any]:
    """Means, errors and all else as JSON values."""
    row: dict[str, Any] = {'head': self.name, 'gain': float(self.gain.mean())}
    of_folds = np.array([self.gain[self.fold == f].mean() for f in np.unique(self.fold)])
    row |= {'stderr': uncertainty.stderr(self.gain), 'stderr_folds': uncertainty.stderr(of_folds)}
    row |= {'extreme': extreme_share(self.gain) if self.gain.any() else None}
    if self.constant is not None:
      row['constant'] = float(self.constant.mean())
      row['constant_stderr'] = uncertainty.stderr(self.constant)
    return row | {'chosen': list(self.chosen), 'price': self.price}


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
  """What `noise_test` finds.

  Attributes:
    nll: of DET on held-out folds, nats per example.
    refit: [N], what DET itself gains by fitting W again, where W was given; None elsewhere.
    tested: heads, then the hidden layer.
    num_rows: rows that were used.
    left_out: rows that were not, because no other fold has their class.
    gradient: the largest of DET's gradients at the ends of its fits.
    tol: what it should be.
    seconds: of all fits.
  """

  nll: float
  refit: np.ndarray | None
  tested: Sequence[Tested]
  num_rows: int
  left_out: int
  gradient: float
  tol: float
  seconds: float


def noise_test(
  x: np.ndarray,
  y: np.ndarray,
  *,
  heads: Sequence[str] = tuple(TITLES),
  C: float = 1.0,
  num_factors: int = 8,
  folds: int = 2,
  target: targets.Target = 'auto',
  location: tuple[np.ndarray, np.ndarray] | None = None,
  tol: float = 1e-3,
  max_iter: int = 500,
  seed: int = 0,
  progress: bool = True,
) -> Result:
  """Estimates what heads with noise would gain over DET.

      >>> from sklearn.datasets import load_iris
      >>> x, y = load_iris(return_X_y=True)
      >>> found = noise_test(x, y, heads=['het_xl'], folds=2, num_factors=2, progress=False)
      >>> [tested.name for tested in found.tested], found.tested[0].gain.shape
      (['het_xl', 'hidden layer'], (150,))

  Args:
    x: features [N, D].
    y: labels, as the estimators take them; with `location` the numbers of its classes.
    heads: names of heads with noise.
    C: inverse strength of the regularisation of W.
    num_factors: m, directions of the noise.
    folds: number of folds; each is held out once.
    target: as in `DetClassifier`.
    location: W [D, K] and b [K] over tau of a trained DET. What is fitted is then added to them.
    tol, max_iter: of DET's fits, see `DetClassifier`.
    seed: of the folds, of rows to leave out, and of the hidden layer.
    progress: whether the fits show how far they are.

  Raises:
    ValueError: labels or settings are wrong.
  """
  if unknown := [name for name in heads if name not in TITLES]:
    raise ValueError(f'heads has {unknown[0]!r}; the test knows {", ".join(TITLES)}')
  x = np.asanyarray(x)  # keeps a memory map
  if x.ndim != 2:
    raise ValueError(f'x has shape {x.shape}; it must be [N, D]')
  start = time.perf_counter()
  classes = None if location is None else np.arange(location[0].shape[1])
  rng = np.random.default_rng(seed)
  labels = targets.encode(inputs.labels_of_rows(len(x), y), target, classes)
  k = len(labels.classes)
  chosen = np.arange(len(x))
  if len(x) * k > MAX_ENTRIES:
    chosen = np.sort(rng.choice(len(x), max(MAX_ENTRIES // k, folds), replace=False))
  if folds > len(chosen):
    raise ValueError(f'folds={folds} must be at most {len(chosen)}, the number of rows')
  x = np.asarray(x[chosen], np.float32)
  labels = labels[chosen]
  if not np.isfinite(x).all():
    raise ValueError('the features contain NaN or infinity')
  if k < 2 and labels.link == 'softmax':
    raise ValueError(f'the labels have {k} class; the test needs at least 2')
  test = _Test(k, labels.link, x.shape[1], C, num_factors, tol, max_iter, seed, location)
  parts = KFold(folds, shuffle=True, random_state=seed).split(x)
  nll = {}
  refit = np.zeros(len(x))
  of_fold = np.zeros(len(x), int)
  names = (*heads, HIDDEN)
  gradient = 0.0
  seen = np.ones(len(x), bool)
  with Progress('noise test', folds * (1 + len(names)), unit='fits', shown=progress) as bar:
    for number, (fitted, held_out) in enumerate(parts):
      of_fold[held_out] = number
      if labels.kind in ('classes', 'votes') and location is None:
        seen[held_out] = probe.are_known(labels.values[held_out], labels.values[fitted])
      fold = _Fold(test, x, labels, fitted, held_out)
      gradient = max(gradient, fold.det.gradient)
      refit[held_out] = fold.refit
      bar.update(1)
      for name in names:
        found = fold.hidden() if name == HIDDEN else fold.noise(name)
        for setting, values in found.items():
          nll.setdefault((name, setting), np.zeros(len(x)))[held_out] = values
        nll.setdefault((name, 'none'), np.zeros(len(x)))[held_out] = fold.det_nll
        bar.update(1)
  num_fitted = len(x) - len(x) // folds
  tested = []
  for name in names:
    price = None if name == HIDDEN else test.num_noise_params(name) / (2 * num_fitted)
    of_name = {setting: values[seen] for (n, setting), values in nll.items() if n == name}
    tested.append(_chosen(name, of_name, of_fold[seen], price))
  return Result(
    float(nll[names[0], 'none'][seen].mean()),
    None if location is None else refit[seen],
    tested,
    int(seen.sum()),
    int((~seen).sum()),
    gradient,
    tol,
    time.perf_counter() - start,
  )


def _chosen(name, nll, fold, price) -> Tested:
  """Takes for each fold the least noise within a standard error of the best on the other folds."""
  order = ['none', *(s for s in nll if s != 'none')]  # from little to much
  gain = np.zeros(len(fold))
  chosen = []
  of_all = np.stack([nll[s] for s in order])
  for number in np.unique(fold):
    own = fold == number
    chosen.append(order[selection.least_noise(np.arange(len(order)), of_all[:, ~own])])
    gain[own] = nll['none'][own] - nll[chosen[-1]][own]
  constant = nll['none'] - nll['constant'] if 'constant' in nll else None
  return Tested(name, gain, constant, fold, chosen, price)


@dataclasses.dataclass(frozen=True, eq=False)
class _Test:
  num_classes: int
  link: str
  num_features: int
  c: float
  num_factors: int
  tol: float
  max_iter: int
  seed: int
  location: tuple[np.ndarray, np.ndarray] | None

  @property
  def model(self) -> FirstOrder:
    return FirstOrder('det', self.num_classes, self.link, num_samples=1)

  def head(self, name: str) -> Model:
    size = (('num_factors', self.num_factors),)
    return Model(name, self.num_classes, self.link, noise=size)

  def num_noise_params(self, name: str) -> int:
    shapes = self.head(name).param_shapes(self.num_features)
    return sum(int(np.prod(shape)) for path, shape in shapes.items() if is_noise(path))


class _Fold:
  """The fits to the rows of all folds but one."""

  def __init__(self, test: _Test, x, labels, fitted, held_out):
    self.test = test
    self.model = test.model
    self.features = inputs.Features(x[held_out])
    self.values = labels.values[held_out]
    of_fit = labels[fitted]
    self.mean = x[fitted].mean(axis=0)
    self.rows = objective.make_rows(
      self.model, x[fitted], self.mean, of_fit.values, np.ones(len(fitted)), test.c, 1.0
    )
    ones = np.ones(len(fitted))
    params = self.model.deterministic.init(test.seed, x.shape[1])
    start = det_start(self.model.deterministic, params, of_fit.class_shares(ones))
    if test.location is not None:
      w, b = (np.asarray(a, np.float32) for a in test.location)
      offset = np.concatenate([w, (b + self.mean @ w)[None]])
      zeros = jax.tree.map(np.zeros_like, start['head'])
      start = {'head': zeros, 'fixed': {'offset': offset}}
      given_nll = self.score(start)
    self.det = self._fit(start, 1.0, test.max_iter, test.tol)
    self.det_nll = self.score(self.det.params)
    self.refit = given_nll - self.det_nll if test.location is not None else 0.0

  def noise(self, name: str) -> dict[str, np.ndarray]:
    """NLL of held-out rows [N], nats, under each strength of the noise."""
    test = self.test
    det = self.det.params
    head = test.head(name)
    fitted = {'head': dict(det['head'])}
    if test.location is not None:  # the directions are those of the whole location
      offset = det['fixed']['offset']
      whole = {
        'kernel': offset[:-1] + det['head']['kernel'],
        'bias': offset[-1] + det['head']['bias'],
      }
      fitted = {'head': whole}
    initial = head.init(test.seed, test.num_features)
    size, to_logits, _ = noise_map(head, fitted, initial)
    count = min(test.num_factors, size)
    found = noise_directions(head, fitted, initial, self.rows, count)
    in_logits = to_logits(found.T.astype(np.float32))  # [K, m]
    fixed = {**det.get('fixed', {}), 'directions': np.ascontiguousarray(in_logits, np.float32)}
    params = {
      'head': det['head'],
      'fixed': fixed,
      'size': {'v_bias': np.full(count, FIRST_SIZE, np.float32)},
    }
    params = self._fit(params, 1.0).params
    scores = {'constant': self.score(params)}
    size = {**params['size'], 'v_kernel': np.zeros((test.num_features, count), np.float32)}
    params = {**params, 'size': size}
    for strength in STRENGTHS:
      params = self._fit(params, strength).params
      scores[f'{strength:g}'] = self.score(params)
    return scores

  def hidden(self) -> dict[str, np.ndarray]:
    """Gains under each strength of a random hidden layer."""
    test = self.test
    det = self.det.params
    rng = np.random.default_rng(test.seed)
    x = np.asarray(self.rows.x).reshape(-1, test.num_features)[: 2**12]
    a = rng.normal(size=(test.num_features, NUM_HIDDEN))
    a /= np.maximum((x @ a).std(axis=0), 1e-6)
    hidden = np.concatenate([a, rng.normal(size=(1, NUM_HIDDEN))]).astype(np.float32)
    matrix = np.zeros((NUM_HIDDEN, test.num_classes), np.float32)
    # The matrix then has the curvature of order 1 that whitened coordinates have.
    p = self.model.location_prob(det, self.rows.x[0])
    scale = np.float32(1.0 / np.sqrt(np.maximum(np.mean(p * (1.0 - p)), 1e-6)))
    fixed = {**det.get('fixed', {}), 'hidden': hidden, 'scale': scale}
    params = {'head': det['head'], 'fixed': fixed, 'output': {'matrix': matrix}}
    scores = {}
    for strength in HIDDEN_STRENGTHS:
      params = self._fit(params, strength).params
      scores[f'{strength:g}'] = self.score(params)
    return scores

  def score(self, params) -> np.ndarray:
    return fitting.apply(self.model, 'nll', params, self.mean, self.features, self.values)

  def _fit(self, params, strength, max_iter=MAX_ITER, tol=None):
    noise_strength = jnp.float32(1.0 / (strength * self.test.c))
    rows = dataclasses.replace(self.rows, noise_strength=noise_strength)
    with placement.on(None), warnings.catch_warnings():
      warnings.simplefilter('ignore', ConvergenceWarning)
      minimise = functools.partial(lbfgs.minimise, self.model, params, rows, progress=False)
      return minimise(tol=tol or 0.1 * self.test.tol, max_iter=max_iter)
