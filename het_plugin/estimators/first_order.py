"""DET whose prediction noise changes to the first order, which needs no samples.

Noise of the logits along directions u_j with small variances a_j(x) changes the softmax p to

    p'(t | x) proportional to p(t | x) exp(sum_j a_j(x) (u_jt - E_p u_j)^2 / 2)

up to terms of second order in a_j: the exponent is the gain tr(Sigma h) / 2 of `directions`. The
log-odds of a sigmoid grow by s_k^2 (1 - 2 p_k) / 2 with s_k^2 = sum_j a_j(x) u_jk^2. a_j(x) is the
square of a linear function of the features, or a constant.
"""

import dataclasses

import jax
import jax.numpy as jnp

from het_plugin.estimators.model import Model


@dataclasses.dataclass(frozen=True)
class FirstOrder(Model):
  """DET whose prediction noise changes to the first order, or with a random hidden layer beside it.

  'head' has the parameters of DET. The other groups are optional, and 'fixed' is not learned:

      fixed: directions [K, m], hidden [D + 1, M], offset [D + 1, K] added to (W; b)
      size: v_kernel [D, m], v_bias [m]; a_j(x) = (v_kernel_j . x + v_bias_j)^2
      output: matrix [M, K] of the hidden layer, over fixed scale
  """

  def location_prob(self, params, x):
    link = jax.nn.softmax if self.link == 'softmax' else jax.nn.sigmoid
    return link(self._location(params, x))

  def multiplied(self, params):
    return params

  def nll(self, params, x, target, draws=None):
    del draws  # it takes no samples
    changed = self._changed(params, x)
    if self.link == 'sigmoid':
      return -jax.nn.log_sigmoid(jnp.where(target > 0, changed, -changed)).sum(-1)
    log_p = jax.nn.log_softmax(changed)
    if target.dtype.kind == 'f':
      return -jnp.where(target > 0, target * log_p, 0.0).sum(-1)
    listed = target >= 0
    of_labels = jnp.take_along_axis(log_p, jnp.where(listed, target, 0), axis=1)
    return -jnp.where(listed, of_labels, 0.0).sum(-1) / jnp.maximum(listed.sum(-1), 1)

  def penalty(self, params):
    of_others = jnp.zeros(())
    if 'output' in params:
      of_others = jnp.square(_fixed(params)['scale'] * params['output']['matrix']).sum()
    elif 'v_kernel' in params.get('size', ()):
      of_others = jnp.square(params['size']['v_kernel']).sum()
    of_location = jnp.square(params['head']['kernel']).sum()
    if 'offset' in params.get('fixed', ()):  # few rows of a run would move all biases
      of_location += jnp.square(params['head']['bias']).sum()
    return of_location, of_others

  def _location(self, params, x):
    location = x @ params['head']['kernel'] + params['head']['bias']
    if 'offset' in (fixed := _fixed(params)):
      location += x @ fixed['offset'][:-1] + fixed['offset'][-1]
    return location

  def _changed(self, params, x):
    """Log-odds, or logits up to a constant, [B, K]."""
    location = self._location(params, x)
    fixed = _fixed(params)
    if 'hidden' in fixed:
      hidden = jax.nn.gelu(x @ fixed['hidden'][:-1] + fixed['hidden'][-1])
      return location + hidden @ (fixed['scale'] * params['output']['matrix'])
    if 'size' not in params:
      return location
    size = params['size']
    u = fixed['directions']
    a = jnp.square(size['v_bias'] + (x @ size['v_kernel'] if 'v_kernel' in size else 0.0))  # [B, m]
    a = jnp.broadcast_to(a, (len(x), u.shape[1]))
    if self.link == 'sigmoid':
      return location + (a @ jnp.square(u).T) * (0.5 - jax.nn.sigmoid(location))
    mean = jax.nn.softmax(location) @ u  # [B, m]
    # a (u - mean)^2 / 2 without a mean^2 / 2, which is the same for all classes.
    return location + a @ (0.5 * jnp.square(u)).T - (a * mean) @ u.T


def _fixed(params):
  return jax.lax.stop_gradient(params.get('fixed', {}))
