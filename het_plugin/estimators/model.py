"""A head over features, or over an MLP of them, as pure functions of its parameters.

The objective is that of logistic regression:

    sum_i w_i nll_i + (|W|^2 + squares of hidden layers) / (2 C)
                    + squares of the matrices of the noise (K_v, K_d, J, W') / (2 C_noise)

divided by sum_i w_i; biases are not regularised. If tau is learned, W / tau is regularised, so that
a small tau cannot avoid the penalty. With two classes the squares of W count twice, so that DET is
scikit-learn's binary logistic regression, which has one column.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from flax.linen import partitioning

from het_plugin import heads
from het_plugin.heads.covariance import MIN_DIAG
from het_plugin.integrate import GaussianLogits, Integrator, LowRank, exact, shared_key

PyTree = dict
ROW_MULTIPLE = 16  # of the rows of a block, which the data axis of a mesh divides


class UsedBuckets(heads.HetH):
  """HET-H without the buckets that hold no class, which change nothing: 94 of 768 for K = 100."""

  @nn.nowrap
  def used(self, pre_logits_dim: int) -> np.ndarray:
    """Numbers of the buckets that hold a class, ascending, of `HetH`'s."""
    return np.unique(super().buckets(pre_logits_dim))

  @nn.nowrap
  def unpadded_noise_dim(self, pre_logits_dim: int) -> int:
    return len(self.used(pre_logits_dim))

  @nn.nowrap
  def buckets(self, pre_logits_dim: int) -> np.ndarray:
    all_buckets = super().buckets(pre_logits_dim)
    return np.searchsorted(np.unique(all_buckets), all_buckets).astype(np.int32)


HEADS = {'det': heads.Det, 'het': heads.Het, 'het_h': UsedBuckets, 'het_xl': heads.HetXL}


@dataclasses.dataclass(frozen=True)
class Model:
  """The settings of a model, static under jit.

  Attributes:
    head: a name in `HEADS`.
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
  noise: tuple[tuple[str, object], ...] = ()
  class_multiple: int = 1

  @property
  def integrator(self) -> Integrator:
    # The points of a tilt would move with the parameters, but L-BFGS needs a function of them.
    # Those of a rotation move little: fits may end at gradients of 0.01, but with a lower NLL.
    return Integrator(num_samples=self.num_samples, sampler='sobol', tilt=False)

  @property
  def deterministic(self) -> 'Model':
    """The same without noise."""
    return dataclasses.replace(self, head='det', noise=(), num_samples=1)

  def make_head(self) -> heads.Classifier:
    """The head as a linen module, as in a training run; of HET-H with `UsedBuckets`."""
    temperature = heads.FixedTemperature(1.0 if self.tau is None else self.tau)
    if self.tau is None:
      low, high = self.tau_range
      temperature = heads.LearnedTemperature(low, high, 1.0 if low < 1.0 < high else None)
    return HEADS[self.head](
      num_classes=self.num_classes,
      link=self.link,
      temperature=temperature,
      class_multiple=self.class_multiple,
      **dict(self.noise),
    )

  def module(self) -> nn.Module:
    return _HeadOverFeatures(self.make_head(), self.hidden_layers)

  def features(self, params: PyTree, x: jax.Array) -> jax.Array:
    """phi [B, D], the input of the head; x itself without hidden layers."""
    return self.module().apply({'params': params}, x, method='features')

  def logits(self, params: PyTree, x: jax.Array) -> GaussianLogits:
    """Features x [B, D] to the Gaussian over logits; `params` may be those of `multiplied`."""
    params = self.multiplied(params)
    if 'maps' in params:
      return self._affine(params, self.features(params, x))
    return self.module().apply({'params': params}, x)

  def multiplied(self, params: PyTree) -> PyTree:
    """The parameters, of HET-XL with the product of K_v, J and W, which no row changes.

    V(x) W is affine in phi, so v(x) in R^D, half of the cost at D = 768 and K = 100, is never
    formed. A loop over blocks of rows takes the product, and its gradient, once.
    """
    is_plain = {'remainder', 'factor_bias', 'parametrization'}.isdisjoint(dict(self.noise))
    if self.head != 'het_xl' or not is_plain or 'maps' in params:
      return params
    c, kernel = params['head']['covariance'], params['head']['kernel']
    kernel = params['head'].get('noise_kernel', kernel)
    covariance = {name: c[name] for name in ('d_kernel', 'd_bias')}
    return {
      **params,
      'head': {**params['head'], 'covariance': covariance},
      'maps': jnp.einsum('dq,rq,qk->drk', c['v_kernel'], c['J'], kernel),
      'shift': jnp.einsum('q,rq,qk->rk', c['v_bias'], c['J'], kernel),
    }

  def _affine(self, params: PyTree, phi: jax.Array) -> GaussianLogits:
    """HET-XL with the parameters of `multiplied`."""
    maps, shift, params = params['maps'], params['shift'], params['head']
    c, kernel = params['covariance'], params.get('noise_kernel', params['kernel'])
    loading = phi @ maps.reshape(len(maps), -1)
    loading = loading.reshape(-1, *maps.shape[1:]) + shift  # [B, R, Kp]
    d = jax.nn.softplus(phi @ c['d_kernel'] + c['d_bias']) + MIN_DIAG  # [B, Q]
    temperature = self.make_head().temperature
    return GaussianLogits(
      location=phi @ params['kernel'] + params['bias'],
      covariance=LowRank(None, loading, d @ kernel),
      projection=None,
      temperature=temperature.apply({'params': params.get('temperature', {})}),
      num_classes=self.num_classes,
      link=self.link,
    )

  def nll(self, params: PyTree, x: jax.Array, target: jax.Array) -> jax.Array:
    """Negative log-likelihood [B], nats, of `Targets.values`."""
    logits, keys = self.logits(params, x), shared_key(jax.random.key(0))
    if target.dtype.kind == 'i':
      return self.integrator.nll(logits, target, keys)
    if self.link == 'softmax':
      log_p = self.integrator.log_prob(logits, keys)[:, : self.num_classes]
      return -jnp.where(target > 0, target * log_p, 0.0).sum(-1)
    mean, variance = exact.marginals(logits, self.integrator.chunk_bytes)
    mean, variance = mean[:, : self.num_classes], variance[:, : self.num_classes]
    return -exact.log_expected_sigmoid(jnp.where(target > 0, mean, -mean), variance).sum(-1)

  def log_prob(self, params: PyTree, x: jax.Array) -> jax.Array:
    """log p(k | x) [B, K], or log p(y_k = 1 | x) for the sigmoid link."""
    log_p = self.integrator.log_prob(self.logits(params, x), shared_key(jax.random.key(0)))
    return log_p[:, : self.num_classes]

  def location_prob(self, params: PyTree, x: jax.Array) -> jax.Array:
    """link(location / tau), without noise, [B, K]."""
    logits = self.deterministic.logits(params, x)
    u = (logits.location / logits.temperature)[:, : self.num_classes]
    return jax.nn.softmax(u) if self.link == 'softmax' else jax.nn.sigmoid(u)

  def log_odds(self, params: PyTree, x: jax.Array) -> jax.Array:
    """log p_k - log(1 - p_k) of the sigmoid link, [B, K], exact at both ends."""
    mean, variance = exact.marginals(self.logits(params, x), self.integrator.chunk_bytes)
    odds = exact.log_expected_sigmoid(mean, variance) - exact.log_expected_sigmoid(-mean, variance)
    return odds[:, : self.num_classes]

  def entropies(self, params: PyTree, x: jax.Array) -> jax.Array:
    """Entropy of the prediction, and its expectation given the noise, [B, 2]."""
    logits, keys = self.logits(params, x), shared_key(jax.random.key(0))
    expected = self.integrator.expected_entropy(logits, keys)
    log_p = self.log_prob(params, x)
    total = -(jnp.exp(log_p) * log_p).sum(-1)
    if self.link == 'sigmoid':
      log_q = jnp.log1p(-jnp.exp(log_p))
      total = total - jnp.where(log_p < 0, jnp.exp(log_q) * log_q, 0.0).sum(-1)
    return jnp.stack([total, jnp.minimum(expected, total)], axis=1)

  def factors(self, params: PyTree, x: jax.Array) -> jax.Array:
    """G [B, T, K] with G^T G the covariance of the logits over tau."""
    logits = self.logits(params, x)
    return (logits.factors() / logits.temperature)[..., : self.num_classes]

  def penalty(self, params: PyTree) -> tuple[jax.Array, jax.Array]:
    """Sums of squares of the matrices of the location and of the noise.

    Matrices that set the scale of the logits are divided by tau.
    """
    inverse, scaled = 1.0, ()
    if self.tau is None:
      temperature = self.make_head().temperature
      inverse = 1.0 / temperature.apply({'params': params['head']['temperature']})
      # HET-XL's noise goes through W, or W'.
      noise = () if self.head == 'het_xl' else ('v_kernel', 'd_kernel', 'V_kernel')
      scaled = ('kernel', 'noise_kernel', *noise)
    flat = {path: x for path, x in traverse_util.flatten_dict(params).items() if is_matrix(path)}
    sums = {False: jnp.zeros(()), True: jnp.zeros(())}
    for path, x in flat.items():
      is_scaled = path[0] == 'head' and path[-1] in scaled
      sums[is_noise(path)] += jnp.square(x * inverse if is_scaled else x).sum()
    twice = 2.0 if self.link == 'softmax' and self.num_classes == 2 else 1.0
    return twice * sums[False], sums[True]

  def axes(self, num_features: int) -> dict[tuple[str, ...], tuple[str | None, ...]]:
    """Logical axes of the parameters that have some, by path."""
    names = partitioning.get_axis_names(self._shapes(num_features)['params_axes'])
    return {path: tuple(spec) for path, spec in traverse_util.flatten_dict(names).items()}

  def init(self, seed: int, num_features: int) -> PyTree:
    """Initial parameters: normal matrices of variance 1 / rows, biases 0, and the first tau."""
    # In numpy, because every shape of a linen initialiser takes up to a second to compile.
    rng, found = np.random.default_rng(seed), {}
    shapes = traverse_util.flatten_dict(self._shapes(num_features)['params'])
    for path, x in shapes.items():
      size = x.shape[0] ** -0.5 if is_matrix(path) else 0.0
      found[path] = size * rng.standard_normal(x.shape, np.float32)
    params = traverse_util.unflatten_dict(found)
    if self.tau is None:
      params['head']['temperature'] = self.make_head().temperature.init(jax.random.key(0))['params']
    return params

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

  def __call__(self, x):
    return self.head(self.features(x))


def is_matrix(path: tuple[str, ...]) -> bool:
  """Whether the parameter at this path is regularised: all but biases and t."""
  return path[-1].endswith('kernel') or path[-1] == 'J'


def is_noise(path: tuple[str, ...]) -> bool:
  """Whether the parameter at this path belongs to the noise."""
  return 'covariance' in path or path[-1] == 'noise_kernel'
