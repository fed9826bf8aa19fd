"""The four estimators."""

import inspect
from typing import Annotated, Literal

from het_plugin.estimators.classifier import HeadClassifier
from het_plugin.estimators.settings import estimator
from het_plugin.system.ranges import Count


@estimator
class DetClassifier(HeadClassifier):
  """The deterministic head: logistic regression, with several labels, votes and probabilities.

  Minimises sum_i w_i nll_i + |W|^2 / (2 C) by L-BFGS over all rows. Without hidden layers this is
  scikit-learn's `LogisticRegression` of the same C (for an indicator, one per class).

      >>> from sklearn.datasets import load_iris
      >>> from het_plugin.estimators import DetClassifier
      >>> x, y = load_iris(return_X_y=True)
      >>> det = DetClassifier(C=1.0).fit(x, y)
      >>> det.predict_proba(x).shape, bool(det.score(x, y) > 0.95)
      ((150, 3), True)

  Parameters:
    C: inverse strength of the regularisation of W and hidden layers; biases are not regularised.
    tau: the temperature of link(logits / tau): a number; 'learned', which without hidden layers is
      equivalent to 1, because W / tau is regularised; or 'validation', the best of 1/4 .. 4 on
      held-out rows.
    hidden_layers: widths of GELU layers below the head.
    target: kind of y: 'classes', 'indicator', 'votes', 'probabilities' or 'auto'
      (`targets.encode`).
    class_weight: factors of the weights of rows by class, {class: factor}, 1 where one is missing;
      'balanced' gives all classes the same sum of weights; None is 1. As in scikit-learn, and for
      one class per row.
    tol: the search ends when the largest entry of the gradient of the mean objective is below this,
      in coordinates in which the objective has about unit curvature; with noise also when `gap_` is
      at most a hundredth of it, in nats.
    max_iter: largest number of L-BFGS iterations of DET, and of the noise once it has grown for 20;
      if they do not suffice there is a `ConvergenceWarning`, which says how far from the optimum
      the objective may be.
    solver: 'lbfgs' over rows in memory; 'streamed', the same over rows that stay on disk; 'auto'
      streams where X in float32 has more than `inputs.MEMORY_BYTES`. A streamed fit ends early at
      Ctrl-C, with a `ConvergenceWarning`. With noise it may end at a gap of a tenth of p / (2N),
      what p parameters cost.
    mesh: (data, model) numbers of devices that rows and classes are cut over; None is one device.
    validation_fraction: share of rows held out if something is chosen on them.
    random_state: seed of hidden layers, noise and splits. Equal seeds give equal bits.
    progress: whether a terminal shows a bar with the objective, after two seconds. A string is its
      title, and gives a line every ten seconds where there is no terminal.

  Attributes:
    classes_: the classes, [K].
    target_: the kind of y.
    temperature_: tau.
    coef_: W^T / tau, float32 [K, D] ([1, D] for two classes).
    intercept_: b / tau, float32 [K] or [1].
    params_: the linen parameters.
    n_iter_, objective_, gradient_: iterations, objective and gradient at the end of the fit.
    gap_: how far objective_ may be above the optimum, an estimate in nats (`lbfgs.gap_of`). With
      noise there are plateaus and several optima, so another one may be lower.
  """

  _head = 'det'


@estimator
class HetClassifier(HeadClassifier):
  """HET: Gaussian noise in the logits with covariance V(x)^T V(x) + d(x) d(x)^T, Q = K.

  The noise is integrated exactly for an indicator, and over `num_samples` fixed points otherwise,
  so the objective is deterministic. The search starts at DET's optimum with some noise, and ends
  with an objective no worse than DET's. C_noise regularises the matrices of the noise (K_v, K_d, J)
  as C does W. The smaller it is, the closer the result is to DET.

      >>> from sklearn.datasets import load_iris
      >>> from het_plugin.estimators import HetClassifier
      >>> x, y = load_iris(return_X_y=True)
      >>> het = HetClassifier(C_noise=1.0, num_factors=1, num_samples=16).fit(x, y)
      >>> het.covariance(x).shape  # of the logits
      (150, 3, 3)

  Parameters beyond those of `DetClassifier`:
    C_noise: inverse strength of the regularisation of the noise; 0 is no noise (the fit is DET's),
      and None is 0.03 C. 'auto' chooses it on a held-out fifth of the rows from 0 and 0.003, 0.01,
      0.03, 0.1 and 0.3 of C: the least that is as good as the best, up to a standard error
      (`selection.least_noise`). Then all rows are fitted. If too few rows can be held out, it warns
      and takes 0. Of rows on disk a random tenth chooses. C must be finite.
    num_factors: R.
    num_samples: S, points of a softmax in fit and prediction; powers of two are best.

  Attributes beyond those of `DetClassifier`:
    C_noise_: the C_noise of the fit.
    noise_nll_: of 'auto', the mean NLL of the held-out rows by C_noise, nats; None if none were.
  """

  _head = 'het'
  _noise = ('num_factors',)

  C_noise: Annotated[float, '[0, inf]'] | Literal['auto'] | None = 'auto'
  num_factors: Count = 8
  num_samples: Count = 64


@estimator
class HetHClassifier(HetClassifier):
  """HET-H: the noise of HET in R^H, mapped to the classes by a fixed hash.

      >>> from sklearn.datasets import load_iris
      >>> from het_plugin.estimators import HetHClassifier
      >>> x, y = load_iris(return_X_y=True)
      >>> het_h = HetHClassifier(C_noise=1.0, num_factors=1, num_samples=16).fit(x, y)
      >>> het_h.predict(x[:2])
      array([0, 0])

  Parameters beyond those of `HetClassifier`:
    num_buckets: H; None is the number of features.
  """

  _head = 'het_h'
  _noise = ('num_factors', 'num_buckets')

  num_buckets: Count | None = None


@estimator
class HetXLClassifier(HetClassifier):
  """HET-XL: noise in the features (or in the last hidden layer), mapped to the classes by W.

      >>> from sklearn.datasets import load_iris
      >>> from het_plugin.estimators import HetXLClassifier
      >>> x, y = load_iris(return_X_y=True)
      >>> het_xl = HetXLClassifier(C_noise=1.0, num_factors=1, num_samples=16).fit(x, y)
      >>> het_xl.predict(x[:2])
      array([0, 0])

  Parameters beyond those of `HetClassifier`:
    noise_dim: M of a separate W' for the noise (eq. 14); None shares W.
  """

  _head = 'het_xl'
  _noise = ('num_factors', 'noise_dim')

  noise_dim: Count | None = None


# So that `help` of one shows all its parameters.
for _child, _parent in (
  (HetClassifier, DetClassifier),
  (HetHClassifier, HetClassifier),
  (HetXLClassifier, HetClassifier),
):
  _child.__doc__ = f'{inspect.getdoc(_child)}\n\n{inspect.getdoc(_parent)}'


# Keys are the names of the heads in --heads and in gin files.
CLASSIFIERS = {x._head: x for x in (DetClassifier, HetClassifier, HetHClassifier, HetXLClassifier)}
