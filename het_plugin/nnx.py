"""The heads and `PredictiveLogits` as flax.nnx modules.

    from flax import nnx
    from het_plugin.nnx import HetXL, LearnedTemperature, PredictiveLogits

    rngs = nnx.Rngs(0)
    head = HetXL(64, 10, num_factors=5, temperature=LearnedTemperature(), rngs=rngs)
    layer = PredictiveLogits(head, rngs=rngs)  # phi [B, 64] -> logits [B, 10]

Parameters are `nnx.Param`s of the module, under the names that the linen heads give them: `kernel`,
`bias`, `covariance.J`, `temperature.t`. The mathematics is that of `het_plugin.heads`, whose heads
are functions of their parameters.
"""

import functools
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from het_plugin import heads
from het_plugin.heads import FixedTemperature, LearnedTemperature, predictive_logits, row_keys
from het_plugin.heads.predictive import check_integrator
from het_plugin.integrate import AnyIntegrator, GaussianLogits, Integrator

__all__ = [
  'Det',
  'FixedTemperature',
  'HeadModule',
  'Het',
  'HetH',
  'HetXL',
  'LearnedTemperature',
  'PredictiveLogits',
]


class HeadModule(nnx.Module):
  """Base of the heads: the parameters of a head of `het_plugin.heads`, and its function.

  Attributes:
    definition: the linen head, which says what the settings are.
    in_features: D.
    kernel, bias, covariance, temperature: the parameters that the head has, float32.
  """

  linen: type[heads.Classifier]

  def __init__(
    self,
    in_features: int,
    num_classes: int,
    *,
    rngs: nnx.Rngs,
    sharding_rules: Mapping[str, str | None] | Sequence[tuple[str, str | None]] | None = None,
    **settings: Any,
  ):
    """Creates the parameters.

    Args:
      in_features: D, the width of the pre-logits.
      num_classes: K.
      rngs: the stream 'params' gives the initial values.
      sharding_rules: the mesh axis of each logical axis, as {'vocab': 'model'} or
        [('vocab', 'model')]: 'embed' (D), 'vocab' (K), 'noise' (Q) and 'factors' (R); others are
        replicated. Needs a mesh (`jax.set_mesh`). None shards nothing.
      **settings: those of the head of the same name in `het_plugin.heads`.

    Raises:
      ValueError: a setting is out of range, or `sharding_rules` names another axis.
      KeyError: `rngs` has no such stream.
    """
    rules = None if sharding_rules is None else dict(sharding_rules)
    if unknown := {*(rules or ())} - {'embed', 'vocab', 'noise', 'factors'}:
      raise ValueError(
        f'sharding_rules has {", ".join(sorted(unknown))}: the logical axes are embed, vocab, '
        'noise and factors'
      )
    name = type(self).__name__
    if not isinstance(in_features, Integral) or in_features < 1:
      raise ValueError(f'{name}.in_features={in_features!r} must be D, a whole number from 1')
    params_stream = _stream(name, rngs, 'params')
    if 'get_logits' in settings:
      self.get_logits = settings.pop('get_logits')
    self.in_features = in_features
    self.definition = self.linen(num_classes, **settings)
    phi = jnp.zeros((1, in_features))
    variables = self._of(self.definition).init(params_stream(), phi)
    arrays = traverse_util.flatten_dict(variables.get('params', {}))
    axes = traverse_util.flatten_dict(variables.get('params_axes', {}))
    self.paths = tuple(arrays)
    params = {
      path: nnx.Param(x, **_sharding(axes[(*path[:-1], f'{path[-1]}_axes')].names, rules))
      for path, x in arrays.items()
    }
    for name, value in traverse_util.unflatten_dict(params).items():
      setattr(self, name, nnx.Dict(value) if isinstance(value, dict) else value)

  def _of(self, definition):
    """The linen head, with our `get_logits`."""
    get_logits = getattr(self, 'get_logits', None)
    return definition if get_logits is None else definition.clone(get_logits=get_logits)

  def __call__(self, phi: jax.Array) -> GaussianLogits:
    """phi [B, D] -> Gaussian logits."""
    if phi.shape[-1:] != (self.in_features,):
      raise ValueError(
        f'{type(self).__name__}.in_features={self.in_features} must be the width of the '
        f'pre-logits, which are {list(phi.shape)}'
      )
    arrays = {path: functools.reduce(getattr, path, self).get_value() for path in self.paths}
    params = traverse_util.unflatten_dict(arrays)
    return self._of(self.definition).apply({'params': params}, phi)


class Det(HeadModule):
  """`het_plugin.heads.Det`.

  >>> from flax import nnx
  >>> import jax.numpy as jnp
  >>> from het_plugin.nnx import Det
  >>> head = Det(8, 3, class_multiple=4, rngs=nnx.Rngs(0))
  >>> head(jnp.ones((2, 8))).location.shape  # one class is padding
  (2, 4)
  """

  linen = heads.Det


class Het(HeadModule):
  """`het_plugin.heads.Het`."""

  linen = heads.Het


class HetH(HeadModule):
  """`het_plugin.heads.HetH`."""

  linen = heads.HetH


class HetXL(HeadModule):
  """`het_plugin.heads.HetXL`; `get_logits` may be an nnx module, phi [N, D] -> logits [N, K].

  >>> from flax import nnx
  >>> import jax.numpy as jnp
  >>> from het_plugin.nnx import HetXL
  >>> head = HetXL(8, 3, num_factors=2, rngs=nnx.Rngs(0))
  >>> head.covariance.J.shape  # [R, Q]
  (2, 8)
  >>> head(jnp.ones((4, 8))).factors().shape  # [B, R + 1, Kp]
  (4, 3, 128)
  """

  linen = heads.HetXL


class PredictiveLogits(nnx.Module):
  """phi [B, D] -> logits [B, K] of a head: `het_plugin.heads.PredictiveLogits` for nnx.

      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> from het_plugin.nnx import HetXL, PredictiveLogits
      >>> rngs = nnx.Rngs(0)
      >>> layer = PredictiveLogits(HetXL(8, 3, num_factors=2, rngs=rngs), rngs=rngs)
      >>> layer(jnp.ones((2, 8))).shape
      (2, 3)

  The noise of a softmax has a key for each row of the batch, from the stream `rng_collection`, as
  in `nnx.Dropout`. Without rngs, or where `deterministic` is set (`nnx.view`, `model.eval()`), the
  keys are the same in every call.

  `nnx.capture` with `nnx.Intermediate` finds 'gaussian_logits' and 'expected_entropy' [B].

  Attributes:
    head: a head of this module, or another nnx module that returns `GaussianLogits`.
    integrator: `Integrator` or `Location`; None is `Integrator()`.
    deterministic: whether the keys are the same in every call.
    rng_collection: name of the rng stream of the noise.
  """

  def __init__(
    self,
    head: nnx.Module,
    integrator: AnyIntegrator | None = None,
    *,
    deterministic: bool = False,
    rng_collection: str = 'noise',
    rngs: nnx.Rngs | None = None,
  ):
    if not isinstance(head, nnx.Module):
      raise ValueError(
        f'PredictiveLogits.head is {type(head)}; it must be an nnx module, such as '
        'het_plugin.nnx.HetXL(D, K, rngs=rngs)'
      )
    self.head = head
    self.integrator = Integrator() if integrator is None else integrator
    check_integrator('PredictiveLogits', self.integrator)
    self.deterministic = deterministic
    self.rng_collection = rng_collection
    self.rngs = nnx.data(
      None if rngs is None else _stream('PredictiveLogits', rngs, rng_collection).fork()
    )

  def __call__(
    self, phi: jax.Array, *, deterministic: bool | None = None, rngs: nnx.Rngs | None = None
  ) -> jax.Array:
    """phi [B, D] -> logits [B, K], float32 or wider; arguments override the attributes."""
    is_fixed = self.deterministic if deterministic is None else deterministic
    stream = self.rngs
    if rngs is not None:
      stream = _stream('PredictiveLogits', rngs, self.rng_collection)
    key = jax.random.key(0) if is_fixed or stream is None else stream()
    keys = row_keys(key, phi.shape[0])
    logits = self.head(phi)
    if hasattr(self, '__captures__'):  # inside nnx.capture
      self.sow(nnx.Intermediate, 'gaussian_logits', logits)
      if isinstance(self.integrator, Integrator):
        entropy = self.integrator.expected_entropy(logits, keys)
        self.sow(nnx.Intermediate, 'expected_entropy', entropy)
    return predictive_logits(logits, self.integrator, keys)

  def set_view(self, deterministic: bool | None = None) -> None:
    """What `nnx.view` calls."""
    if deterministic is not None:
      self.deterministic = deterministic


def _stream(owner: str, rngs: Any, name: str) -> nnx.RngStream:
  if not isinstance(rngs, nnx.Rngs):
    raise ValueError(f'{owner}.rngs is {type(rngs)}; it must be nnx.Rngs, such as nnx.Rngs(0)')
  return rngs[name]


def _sharding(names, rules):
  """The metadata with which nnx places a parameter of these logical axes."""
  if rules is None:
    return {}
  return {'out_sharding': tuple(rules.get(name) for name in names)}
