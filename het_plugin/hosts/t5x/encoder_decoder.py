"""Heads of this project in t5x's minimal T5: the tokens of the vocabulary are the K classes.

B sequences, T target tokens each, D the width of the decoder, K the size of the vocabulary (Kp with
the head's padding).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from flax import linen as nn
from t5x import adafactor, losses, models
from t5x.examples.t5 import network

from het_plugin.integrate import GaussianLogits, Integrator, example_keys, shared_key

PROJECTION = 'logits_dense'  # the layer of the network that the head replaces
# Noise dimensions are as wide as the decoder; there are few factors.
FACTOR_RULES = {'noise': adafactor.FactorDim.COLUMN, 'factors': adafactor.FactorDim.ROW}

Batch = Mapping[str, jax.Array]
PyTree = Any


class Transformer(network.Transformer):
  """t5x's minimal T5 with a classifier head instead of `logits_dense`.

  The head has the path of that layer, `decoder/logits_dense`, and its kernel [D, Kp] is also called
  `kernel`. So a checkpoint of T5 initialises the whole network, including W.

  Attributes:
    config: t5x's T5Config.
    head: `Det`, `Het`, `HetH` or `HetXL` with num_classes = config.vocab_size.
    integrator: estimates the predictive distribution in evaluation, scoring and decoding.
    eval_seed: seed of the noise outside training. All tokens share their draws, so the distribution
      of a token is a function of the parameters and of the tokens before it, both in beam search
      and in scoring.
  """

  head: nn.Module
  integrator: Integrator
  eval_seed: int = 0

  def setup(self):
    if self.config.logits_via_embedding:
      raise ValueError(
        'T5Config.logits_via_embedding=True has no last layer for the head to replace: bind False'
      )
    if self.head.num_classes != self.config.vocab_size:
      raise ValueError(
        f'{type(self.head).__name__}.num_classes={self.head.num_classes} must be '
        f'T5Config.vocab_size, {self.config.vocab_size}'
      )
    if self.head.link != 'softmax':
      raise ValueError(
        f"{type(self.head).__name__}.link={self.head.link!r} must be 'softmax', because a token is "
        'exactly one word of the vocabulary'
      )
    super().setup()

  def decode(self, *args, **kwargs) -> jax.Array:
    """t5x's `decode`, with log p(token) float32 [B, T, Kp] as logits.

    Their softmax is the predictive distribution itself. Padded tokens have about -1e30.
    """
    key = shared_key(jax.random.key(self.eval_seed))
    with nn.intercept_methods(
      self._head_then(lambda logits: self.integrator.log_prob(logits, key))
    ):
      return super().decode(*args, **kwargs)

  def gaussian_logits(
    self,
    encoder_input_tokens: jax.Array,
    decoder_input_tokens: jax.Array,
    decoder_target_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
    decoder_positions: jax.Array | None = None,
    enable_dropout: bool = True,
  ) -> GaussianLogits:
    """The head's logits of the B * T target tokens, in order; arguments as t5x's `__call__`."""
    encoded = self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout)
    found = []
    with nn.intercept_methods(self._head_then(found.append)):
      super().decode(
        encoded,
        encoder_input_tokens,
        decoder_input_tokens,
        decoder_target_tokens,
        encoder_segment_ids,
        decoder_segment_ids,
        decoder_positions,
        enable_dropout,
      )
    (logits,) = found
    return logits

  def _head_then(self, use: Callable[[GaussianLogits], jax.Array | None]) -> Callable[..., Any]:
    """An interceptor that calls the head instead of the projection, and `use` on its result."""

    def intercept(next_fun, args, kwargs, context):
      module = context.module
      if module.name != PROJECTION or context.method_name != '__call__':
        return next_fun(*args, **kwargs)
      (y,) = args  # [B, T, D]
      head = self.head.copy(parent=module.scope)
      used = use(head(y.reshape(-1, y.shape[-1])))
      return y if used is None else used.reshape(*y.shape[:-1], -1)

    return intercept


class EncoderDecoderModel(models.EncoderDecoderModel):
  """t5x's EncoderDecoderModel, trained on the likelihood of a head's predictive distribution.

  Evaluation, scoring and decoding are t5x's own: the network returns log-probabilities as logits.
  There is no label smoothing and no z-loss, because they are defined for one softmax and not for a
  mean of several.
  """

  def __init__(self, *args: Any, train_integrator: Integrator, **kwargs: Any):
    """Takes the arguments of t5x's model and the integrator of the training loss.

    t5x sums the gradients of microbatches. With several of them, `loss_normalizing_factor` must be
    a number, or None for the sum over the tokens.
    """
    super().__init__(*args, **kwargs)
    self.train_integrator = train_integrator

  def loss_fn(
    self, params: PyTree, batch: Batch, dropout_rng: jax.Array | None
  ) -> tuple[jax.Array, models.MetricsMap]:
    """Weighted sum of -log p over the target tokens, divided by the normalizing factor; metrics.

    In training every token has its own noise, and accuracy is measured on the noise-free
    logits. Without `dropout_rng`, loss and accuracy use the predictive distribution.
    """
    if dropout_rng is None:
      return super().loss_fn(params, batch, None)
    dropout_rng, noise_rng = jax.random.split(dropout_rng)
    targets = batch['decoder_target_tokens']  # [B, T]
    logits = self.module.apply(
      {'params': params},
      batch['encoder_input_tokens'],
      batch['decoder_input_tokens'],
      targets,
      encoder_segment_ids=batch.get('encoder_segment_ids'),
      decoder_segment_ids=batch.get('decoder_segment_ids'),
      decoder_positions=batch.get('decoder_positions'),
      rngs={'dropout': dropout_rng},
      method='gaussian_logits',
    )
    keys = example_keys(noise_rng, jnp.arange(targets.size))
    nll = self.train_integrator.nll(logits, targets.reshape(-1, 1), keys).reshape(targets.shape)
    factor, weights = losses.get_loss_normalizing_factor_and_weights(
      self._loss_normalizing_factor, batch
    )
    loss = (nll if weights is None else nll * weights).sum()
    loss = loss if factor is None else loss / factor
    metrics = self._compute_metrics(
      logits=logits.location[:, : logits.num_classes].reshape(*targets.shape, -1),
      targets=targets,
      mask=weights,
      loss=loss,
      segment_ids=_segment_ids(batch),
    )
    metrics['tau'] = clu_metrics.LastValue.from_model_output(logits.temperature[None])
    return loss, metrics


def _segment_ids(batch: Batch) -> dict[str, jax.Array]:
  """The segment ids from which t5x's metrics compute the share of padding."""
  suffix = '_segment_ids'
  packed = {name.removesuffix(suffix): x for name, x in batch.items() if name.endswith(suffix)}
  features = ('encoder_input_tokens', 'decoder_target_tokens')
  return packed or {name: batch[name] != 0 for name in features}


def logical_factor_rules() -> dict[str, adafactor.FactorDim]:
  """Rules for the second moments of Adafactor: t5x's standard ones, and more for the heads."""
  return dict(adafactor.standard_logical_factor_rules()) | FACTOR_RULES


def multiply_by_parameter_scale() -> adafactor.HParamMap:
  """Scales Adafactor's steps by the size of a parameter, except for parameters that start at zero.

  These are biases and the t of the temperature. Steps of a thousandth of the learning rate would
  leave them unchanged.
  """
  return adafactor.HParamMap(((r'.*(bias|/t)$', False), (r'.*', True)))
