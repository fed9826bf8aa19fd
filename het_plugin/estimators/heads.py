"""The four estimators."""

from het_plugin.estimators.classifier import HeadClassifier


def _keep(estimator: HeadClassifier, arguments: dict[str, object]) -> None:
  """Sets the arguments of `__init__` as attributes of the same names, as scikit-learn expects."""
  for name, value in arguments.items():
    if value is not estimator:
      setattr(estimator, name, value)


class DetClassifier(HeadClassifier):
  """The deterministic head: logistic regression, with several labels, votes and probabilities.

  Minimises sum_i w_i nll_i + |W|^2 / (2 C) by L-BFGS over all rows. Without hidden layers this is
  scikit-learn's `LogisticRegression` of the same C (for an indicator, one per class).

  Parameters:
    C: inverse strength of the regularisation of W and hidden layers; biases are not regularised.
    tau: the temperature of link(logits / tau): a number; 'learned', which without hidden layers is
      equivalent to 1, because W / tau is regularised; or 'validation', the best of 1/4 .. 4 on
      held-out rows.
    hidden_layers: widths of GELU layers below the head.
    target: kind of y: 'classes', 'indicator', 'votes', 'probabilities' or 'auto'
      (`targets.encode`).
    tol: the search ends when the largest entry of the gradient of the mean objective is below this,
      in coordinates in which the objective has unit curvature.
    max_iter: largest number of L-BFGS iterations; if they do not suffice there is a
      `ConvergenceWarning`.
    solver: 'lbfgs'; 'adam' over minibatches; 'auto' takes minibatches where X in float32 has more
      than `inputs.MEMORY_BYTES`. For 'adam' max_iter counts epochs, and tol does not matter.
    mesh: (data, model) numbers of devices that rows and classes are cut over; None is one device.
    validation_fraction: share of rows held out if something is chosen on them.
    random_state: seed of hidden layers, noise and splits. Equal seeds give equal bits.
    progress: whether a bar shows the objective.

  Attributes:
    classes_: the classes, [K].
    target_: the kind of y.
    temperature_: tau.
    coef_: W^T / tau, float32 [K, D] ([1, D] for two classes).
    intercept_: b / tau, float32 [K] or [1].
    params_: the linen parameters.
    n_iter_, objective_, gradient_: iterations, objective and gradient at the end of the fit.
  """

  _head = 'det'

  def __init__(
    self,
    C=1.0,  # noqa: N803
    *,
    tau=1.0,
    hidden_layers=(),
    target='auto',
    tol=1e-4,
    max_iter=500,
    solver='auto',
    mesh=None,
    validation_fraction=0.1,
    random_state=0,
    progress=False,
  ):
    _keep(self, locals())


class HetClassifier(HeadClassifier):
  """HET: Gaussian noise in the logits with covariance V(x)^T V(x) + d(x) d(x)^T, Q = K.

  The noise is integrated exactly for an indicator, and over `num_samples` fixed points otherwise,
  so the objective is deterministic. The search starts at DET's optimum with little noise, and ends
  with an objective no worse than DET's. C regularises the matrices of the noise (K_v, K_d, J) as it
  does W, unless C_noise is given. The smaller C_noise, the closer the result is to DET.

  Parameters beyond those of `DetClassifier`:
    C_noise: inverse strength of the regularisation of the noise; None is C, and 0 is no noise (the
      fit is DET's). With few rows per class the noise needs a smaller value than W: choose it on
      held-out rows (`probe.choose`).
    num_factors: R.
    num_samples: S, points of a softmax in fit and prediction; powers of two are best.
  """

  _head = 'het'
  _noise = ('num_factors',)

  def __init__(
    self,
    C=1.0,  # noqa: N803
    *,
    C_noise=None,  # noqa: N803
    tau=1.0,
    num_factors=8,
    num_samples=64,
    hidden_layers=(),
    target='auto',
    tol=1e-4,
    max_iter=500,
    solver='auto',
    mesh=None,
    validation_fraction=0.1,
    random_state=0,
    progress=False,
  ):
    _keep(self, locals())


class HetHClassifier(HetClassifier):
  """HET-H: the noise of HET in R^H, mapped to the classes by a fixed hash.

  Parameters beyond those of `HetClassifier`:
    num_buckets: H; None is the number of features.
  """

  _head = 'het_h'
  _noise = ('num_factors', 'num_buckets')

  def __init__(
    self,
    C=1.0,  # noqa: N803
    *,
    C_noise=None,  # noqa: N803
    tau=1.0,
    num_factors=8,
    num_buckets=None,
    num_samples=64,
    hidden_layers=(),
    target='auto',
    tol=1e-4,
    max_iter=500,
    solver='auto',
    mesh=None,
    validation_fraction=0.1,
    random_state=0,
    progress=False,
  ):
    _keep(self, locals())


class HetXLClassifier(HetClassifier):
  """HET-XL: noise in the features (or in the last hidden layer), mapped to the classes by W.

  Parameters beyond those of `HetClassifier`:
    noise_dim: M of a separate W' for the noise (eq. 14); None shares W.
  """

  _head = 'het_xl'
  _noise = ('num_factors', 'noise_dim')

  def __init__(
    self,
    C=1.0,  # noqa: N803
    *,
    C_noise=None,  # noqa: N803
    tau=1.0,
    num_factors=8,
    noise_dim=None,
    num_samples=64,
    hidden_layers=(),
    target='auto',
    tol=1e-4,
    max_iter=500,
    solver='auto',
    mesh=None,
    validation_fraction=0.1,
    random_state=0,
    progress=False,
  ):
    _keep(self, locals())


# Keys are the names of the heads in --heads and in gin files.
CLASSIFIERS = {x._head: x for x in (DetClassifier, HetClassifier, HetHClassifier, HetXLClassifier)}
