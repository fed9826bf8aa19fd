"""A head over features, or over an MLP of them, as pure functions of its parameters.

The objective is that of logistic regression:

    sum_i w_i nll_i + (|W|^2 + squares of hidden layers) / (2 C)
                    + squares of the matrices of the noise (K_v, K_d, J, W') / (2 C_noise)

divided by sum_i w_i; biases are not regularised. If tau is learned, W / tau is regularised, so that
a small tau cannot avoid the penalty. With two classes the squares of W count twice, so that DET is
scikit-learn's binary logistic regression, which has one column.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from flax.linen import partitioning

from het_plugin import heads
from het_plugin.integrate import Draws, GaussianLogits, Integrator, Location, shared_key, sigmoid

PyTree = dict
ROW_MULTIPLE = 16  # of the rows of a block, which the data axis of a mesh divides
_LOADING = 'affine_loading'  # beside the parameters of the head and of hidden layers


@dataclasses.dataclass(frozen=True)
class Model:
  """The settings of a model, static under jit.

  Attributes:
    head: a name in `heads.HEADS`.
    num_classes: K.
    link: 'softmax' or 'sigmoid'.
    tau: the temperature; None learns it within `tau_range`.
    hidden_layers: widths of GELU layers between features and head.
    num_samples: S of the softmax link, the same points for all examples and at every step.
    noise: further fields of the head, such as (('num_factors', 8),).
    class_multiple: K is padded to a multiple of it, which a mesh needs.
  """

  head: str
  num_classes: int
  link: str = 'softmax'
  tau: float | None = 1.0
  tau_range: tuple[float, float] = (0.05, 5.0)
  hidden_layers: tuple[int, ...] = ()
  num_samples: int = 64
  noise: tuple[tuple[str, Any], ...] = ()
  class_multiple: int = 1

  @property
  def integrator(self) -> Integrator:
    # The points of a tilt would move with the parameters, but L-BFGS needs a function of them.
    # A search holds those of a rotation still between two restarts.
    return Integrator(self.num_samples, sampler='sobol', tilt=False).with_fixed_points()

  @property
  def deterministic(self) -> 'Model':
    """This model without noise."""
    return dataclasses.replace(self, head='det', noise=(), num_samples=1)

  def make_head(self) -> heads.Classifier:
    """The head as a linen module, as in a training run; HET-H without empty buckets."""
    temperature = heads.FixedTemperature(1.0 if self.tau is None else self.tau)
    if self.tau is None:
      low, high = self.tau_range
      temperature = heads.LearnedTemperature(
        tau_min=low, tau_max=high, initial_tau=1.0 if low < 1.0 < high else None
      )
    fields: dict[str, Any] = {'link': self.link, **dict(self.noise)}
    if self.head == 'het_h':
      fields['empty_buckets'] = False
    return heads.HEADS[self.head](
      num_classes=self.num_classes,
      temperature=temperature,
      class_multiple=self.class_multiple,
      **fields,
    )

  def module(self) -> nn.Module:
    return _HeadOverFeatures(self.make_head(), self.hidden_layers)

  def features(self, params: PyTree, x: jax.Array) -> jax.Array:
    """phi [B, D], the input of the head; x itself without hidden layers."""
    return self._apply(params, x, method='features')

  def multiplied(self, params: PyTree) -> PyTree:
    """The parameters, of HET-XL with `HetXL.affine_loading`: what many blocks of rows share."""
    if self.head != 'het_xl':
      return params
    return {**params, _LOADING: self.make_head().affine_loading(params['head'])}

  def logits(self, params: PyTree, x: jax.Array) -> GaussianLogits:
    """Features x [B, D] to the Gaussian over logits; `params` may be those of `multiplied`."""
    loading = params.get(_LOADING) if self.head == 'het_xl' else None
    params = {name: value for name, value in params.items() if name != _LOADING}
    return self._apply(params, x, *([] if loading is None else [loading]))

  def nll(
    self, params: PyTree, x: jax.Array, target: jax.Array, draws: Draws | None = None
  ) -> jax.Array:
    """Negative log-likelihood [B], nats, of `Targets.values`, from given `draws` or its own."""
    return self.nll_of(self.logits(params, x), target, draws)

  @property
  def is_sampled(self) -> bool:
    """Whether the likelihood is a mean over points: a softmax with noise."""
    return self.head != 'det' and self.link == 'softmax'

  def draws(self, params: PyTree, x: jax.Array) -> Draws:
    """Draws for rows x [B, D] under these parameters, if the model is sampled."""
    return self.integrator.draws(self.logits(params, x), shared_key(jax.random.key(0)))

  def num_outputs(self, params: PyTree) -> int:
    """The largest number of outputs of a matrix of the head."""
    return max(x.shape[-1] for x in jax.tree.leaves(params['head']) if np.ndim(x))

  def nll_of(
    self, logits: GaussianLogits, target: jax.Array, draws: Draws | None = None
  ) -> jax.Array:
    """`nll` of given logits."""
    keys = shared_key(jax.random.key(0)) if draws is None else draws
    if target.dtype.kind == 'i':
      return self.integrator.nll(logits, target, keys)
    if self.link == 'softmax':
      log_p = self.integrator.log_prob(logits, keys)[:, : self.num_classes]
      if target.ndim == 3:
        log_p = jnp.take_along_axis(log_p, target[:, 0].astype(jnp.int32), axis=1)
        target = target[:, 1]
      return -jnp.where(target > 0, target * log_p, 0.0).sum(-1)
    mean, variance = sigmoid.marginals(logits)
    mean = mean[:, : self.num_classes]
    variance = variance[:, : self.num_classes]
    return -sigmoid.log_expected_sigmoid(jnp.where(target > 0, mean, -mean), variance).sum(-1)

  def log_prob(self, params: PyTree, x: jax.Array) -> jax.Array:
    """log p(k | x) [B, K], or log p(y_k = 1 | x) for the sigmoid link."""
    log_p = self.integrator.log_prob(self.logits(params, x), shared_key(jax.random.key(0)))
    return log_p[:, : self.num_classes]

  def location_prob(self, params: PyTree, x: jax.Array) -> jax.Array:
    """link(location / tau), without noise, [B, K]."""
    # The parameters may be those of DET, where the noise starts.
    log_p = Location().log_prob(self.deterministic.logits(params, x))
    return jnp.exp(log_p)[:, : self.num_classes]

  def log_odds(self, params: PyTree, x: jax.Array) -> jax.Array:
    """log p_k - log(1 - p_k) of the sigmoid link, [B, K], exact at both ends."""
    return self.integrator.log_odds(self.logits(params, x))[:, : self.num_classes]

  def entropies(self, params: PyTree, x: jax.Array) -> jax.Array:
    """Entropy of the prediction, and its expectation given the noise, [B, 2]."""
    logits = self.logits(params, x)
    keys = shared_key(jax.random.key(0))
    expected = self.integrator.expected_entropy(logits, keys)
    if self.link == 'softmax':
      log_p = self.log_prob(params, x)
      total = -(jnp.exp(log_p) * log_p).sum(-1)
    else:
      odds = self.log_odds(params, x)
      log_p = jax.nn.log_sigmoid(odds)
      log_q = jax.nn.log_sigmoid(-odds)
      total = -(jnp.exp(log_p) * log_p + jnp.exp(log_q) * log_q).sum(-1)
    return jnp.stack([total, jnp.minimum(expected, total)], axis=1)

  def factors(self, params: PyTree, x: jax.Array) -> jax.Array:
    """G [B, T, K] with G^T G the covariance of the logits over tau."""
    logits = self.logits(params, x)
    return (logits.factors() / logits.temperature)[..., : self.num_classes]

  def temperature(self, params: PyTree) -> jax.Array:
    """tau, a scalar."""
    tau = self.make_head().own_temperature
    return jnp.asarray(tau.apply({'params': params['head'].get('temperature', {})}))

  def penalty(self, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """Sums of squares of the matrices of the location and of the noise.

    Matrices that set the scale of the logits are divided by tau.
    """
    inverse = 1.0 / self.temperature(params) if self.tau is None else 1.0
    flat = {path: x for path, x in traverse_util.flatten_dict(params).items() if is_matrix(path)}
    sums = {False: jnp.zeros(()), True: jnp.zeros(())}
    for path, x in flat.items():
      # HET-XL's noise gets its scale from W, or W'. J has none, because v(x) multiplies it.
      in_logits = self.head != 'het_xl' or 'covariance' not in path
      is_scaled = path[0] == 'head' and path[-1].endswith('kernel') and in_logits
      sums[is_noise(path)] += jnp.square(x * inverse if is_scaled else x).sum()
    twice = 2.0 if self.link == 'softmax' and self.num_classes == 2 else 1.0
    return twice * sums[False], sums[True]

  def axes(self, num_features: int) -> dict[tuple[str, ...], tuple[str | None, ...]]:
    """Logical axes of the parameters that have some, by path."""
    names = partitioning.get_axis_names(self._shapes(num_features)['params_axes'])
    return {path: tuple(spec) for path, spec in traverse_util.flatten_dict(names).items()}

  def init(self, seed: int, num_features: int) -> PyTree:
    """Initial parameters: normal matrices of variance 1 / rows, biases 0, and the first tau."""
    # In numpy, because every shape of a linen initialiser takes up to a second to compile. Each
    # parameter has a stream of its own, with classes last: those that a mesh pads change no other.
    found = {}
    for path, shape in sorted(self.param_shapes(num_features).items()):
      rng = np.random.default_rng([seed, len(found)])
      size = shape[0] ** -0.5 if is_matrix(path) else 0.0
      normal = rng.standard_normal(shape[::-1], np.float32).T
      found[path] = np.ascontiguousarray(size * normal)
    params = traverse_util.unflatten_dict(found)
    if self.tau is None:
      tau = self.make_head().own_temperature
      params['head']['temperature'] = tau.init(jax.random.key(0))['params']
    return params

  def param_shapes(self, num_features: int) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Shapes of the parameters by path."""
    flat = traverse_util.flatten_dict(self._shapes(num_features)['params'])
    return {path: x.shape for path, x in flat.items()}

  def _apply(self, params, *inputs, **settings):
    return self.module().apply({'params': params}, *inputs, **settings)

  def _shapes(self, num_features):
    x = jnp.zeros((ROW_MULTIPLE, num_features))
    return jax.eval_shape(lambda: self.module().init(jax.random.key(0), x))


class _HeadOverFeatures(nn.Module):
  head: nn.Module
  hidden_layers: tuple[int, ...]

  def setup(self):
    self.hidden = [nn.Dense(width) for width in self.hidden_layers]

  def features(self, x):
    for layer in self.hidden:
      x = nn.gelu(layer(x))
    return x

  def __call__(self, x, *loading):
    return self.head(self.features(x), *loading)


def on_features(model: Model, path: tuple[str, ...]) -> bool:
  """Whether the matrix at this path acts on the features and has a bias beside it."""
  if model.hidden_layers:
    return path == ('hidden_0', 'kernel')
  return path[-1].endswith('kernel') and path[-1] != 'noise_kernel'


def is_matrix(path: tuple[str, ...]) -> bool:
  """Whether the parameter at this path is regularised: all but biases and t."""
  return path[-1].endswith('kernel') or path[-1] == 'J'


def is_noise(path: tuple[str, ...]) -> bool:
  """Whether the parameter at this path belongs to the noise."""
  return 'covariance' in path or path[-1] == 'noise_kernel'
