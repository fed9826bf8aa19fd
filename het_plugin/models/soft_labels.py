"""Losses and accuracies of labels with weights: votes, soft labels, mixed images, label smoothing.

B examples, K classes (Kp with padding), L labels. Labels are int32 [B, L], padded with -1; weights
float32 [B, L] are the probabilities of the labels, 0 for padding. `label_count` float32 [B, L] is
there where images with several labels of equal weight are mixed: the number of labels of the image
that a label is from (`data.annotations.Labels`).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from het_plugin.integrate import AnyIntegrator, GaussianLogits, mirrored

Batch = Mapping[str, jax.Array]


def targets(batch: Batch, logits: GaussianLogits, smoothing: float = 0.0) -> jax.Array:
  """The probability that each class is a label, float32 [B, Kp].

  With a softmax, rows sum to one, or to zero without a label, and several labels without weights
  are equally likely. With a sigmoid, each class is on with its own probability, and labels without
  weights are on.

  `smoothing` is the share of the target that is spread evenly over the classes (softmax) or over on
  and off (sigmoid) (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567, section 7).

  A label of K or more makes its row NaN, as the loss of `Integrator.nll`.
  """
  labels = batch['label']
  weights = batch.get('label_weight', jnp.ones(labels.shape, jnp.float32))
  if logits.link == 'sigmoid':  # each class of a mixed image is on with the share of its image
    weights = weights * batch.get('label_count', 1.0)
  classes = jnp.arange(logits.location.shape[-1])
  target = jnp.where(labels[..., None] == classes, weights[..., None], 0.0).sum(1)  # [B, Kp]
  real = classes < logits.num_classes
  is_wrong = (labels >= logits.num_classes).any(-1, keepdims=True)
  target = jnp.where(is_wrong, jnp.nan, target)
  if logits.link == 'sigmoid':
    target = (1 - smoothing) * jnp.minimum(target, 1.0) + smoothing / 2
    return jnp.where(real, target, 0.0)
  total = target.sum(-1, keepdims=True)
  target = target / jnp.maximum(total, 1e-12)
  smoothed = (1 - smoothing) * target + smoothing / logits.num_classes
  return jnp.where(real & (total != 0), smoothed, 0.0)


def expected_nll(
  integrator: AnyIntegrator,
  logits: GaussianLogits,
  target: jax.Array,
  keys: jax.Array | None,
) -> jax.Array:
  """The expectation over labels drawn from `targets` [B, Kp] of -log p(labels | x), float32 [B]."""
  on = integrator.log_prob(logits, keys)  # [B, Kp]
  nll = jnp.where(target == 0, 0.0, -target * on)
  if logits.link == 'sigmoid':  # the noise is symmetric: p(off) is p(on) of the mirrored logits
    off = integrator.log_prob(mirrored(logits), keys)
    real = jnp.arange(target.shape[-1]) < logits.num_classes
    nll += jnp.where(real, -(1 - target) * off, 0.0)
  return nll.sum(-1)


def nll(
  integrator: AnyIntegrator,
  logits: GaussianLogits,
  batch: Batch,
  keys: jax.Array | None,
  smoothing: float = 0.0,
) -> jax.Array:
  """The NLL of a batch's labels, [B]: `Integrator.nll`, or `expected_nll` if they have weights."""
  if 'label_weight' not in batch and not smoothing:
    return integrator.nll(logits, batch['label'], keys)
  return expected_nll(integrator, logits, targets(batch, logits, smoothing), keys)


def right(log_prob: jax.Array, target: jax.Array) -> jax.Array:
  """The probability that the most probable class is the label, float32 [B].

  Args:
    log_prob: float32 [B, Kp], -inf for padding. Of m equally probable classes each counts 1 / m, as
      in `measures.votes.top_shares`.
    target: `targets` [B, Kp].
  """
  is_top = log_prob == log_prob.max(-1, keepdims=True)
  share = jnp.where(is_top & (target > 0), target, 0.0).sum(-1)
  return share / jnp.maximum(is_top.sum(-1), 1)


def correct(classes: jax.Array, batch: Batch, link: str) -> jax.Array:
  """The probability that each class, int32 [B], is the label, float32 [B].

  It is the weight of the class or, without weights, its share of the votes (softmax), or whether it
  is among the labels (sigmoid). It needs no array [B, K], as `right` does.
  """
  same = classes[:, None] == batch['label']  # [B, L]
  if 'label_weight' in batch:
    weight = jnp.where(batch['label'] >= 0, batch['label_weight'], 0.0)
    if link == 'sigmoid':
      weight = weight * batch.get('label_count', 1.0)
    total = 1.0 if link == 'sigmoid' else jnp.maximum(weight.sum(-1), 1e-12)  # as in `targets`
    return jnp.where(same, weight, 0.0).sum(-1) / total
  if link == 'sigmoid':
    return same.any(-1).astype(jnp.float32)
  return same.sum(-1) / jnp.maximum((batch['label'] >= 0).sum(-1), 1).astype(jnp.float32)
