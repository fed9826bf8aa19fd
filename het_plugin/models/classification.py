"""Image classification behind the model surface of t5x, which its trainer and ours both drive.

B examples, K classes (Kp with padding), D pre-logits, L labels. A batch has image [B, H, W, C] and
label int32 [B, L] padded with -1; and optionally index int32 [B], the identity of each example (its
row if absent), and mask float32 [B], 0 for padding rows (all real if absent).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics as clu_metrics
from flax import linen as nn
from flax import traverse_util

from het_plugin.backbones import as_backbone, with_axes
from het_plugin.integrate import Analytic, GaussianLogits, Integrator, example_keys, shared_key
from het_plugin.models import batches
from het_plugin.models import metrics as metrics_lib

Batch = batches.Batch
Metrics = dict[str, clu_metrics.Metric]
PyTree = Any


class ClassificationModule(nn.Module):
  """The parameters: {'backbone': ..., 'head': ...}."""

  backbone: nn.Module
  head: nn.Module

  def __call__(
    self, image: jax.Array, train: bool = False
  ) -> tuple[GaussianLogits, dict[str, jax.Array]]:
    """image [B, H, W, C] -> the head's logits and the backbone's representations by name."""
    phi, intermediates = self.backbone(image, train=train)
    return self.head(phi), intermediates


@dataclasses.dataclass(frozen=True)
class ParamCounts:
  """Exact numbers of parameters, without the padding of the classes.

  Attributes:
    backbone: of the backbone.
    head: of the head.
    extra: those of the head that a deterministic head with a fixed temperature does not have.
  """

  backbone: int
  head: int
  extra: int

  @property
  def total(self) -> int:
    return self.backbone + self.head


class ClassificationModel:
  """A backbone and a head, trained by maximum likelihood.

  Noise is drawn for each example from its index, or for all alike (`shared_draws`): but for
  dropout, values depend on neither mesh, hosts, batch size nor number of microbatches. Training
  keys come from the step's `dropout_rng`; evaluation, prediction and scoring share one fixed key,
  so they are functions of the parameters.
  """

  def __init__(
    self,
    backbone: nn.Module,
    head: nn.Module,
    optimizer_def: Any,
    train_integrator: Integrator,
    eval_integrator: Integrator | Analytic,
    loss_normalizing_factor: float | None = None,
    eval_seed: int = 0,
    shared_draws: bool = False,
  ):
    """Composes the model.

    Args:
      backbone: `backbone(image, train=False) -> (phi [B, D], {name: representation})` with the
        attribute `pre_logits_dim`, D; or any flax module image -> phi (`backbones.PlainBackbone`).
      head: `head(phi) -> GaussianLogits` with the attributes `num_classes` and `link` and the
        methods `num_params(D)` and `extra_params(D)`.
      optimizer_def: the optimizer that the trainer runs.
      train_integrator: estimates the training loss.
      eval_integrator: estimates metrics, predictions and scores.
      loss_normalizing_factor: None for the mean loss of the real rows of a (micro)batch, which the
        built-in trainer averages by rows. A number for their sum divided by it: t5x sums the
        gradients of microbatches, so bind the global batch size there.
      eval_seed: seed of the noise outside training.
      shared_draws: whether all examples of a step, or of evaluation, take the same normals. That
        saves draws, and the estimates of the examples depend on each other: their mean has more
        variance.

    Raises:
      ValueError: for a loss_normalizing_factor that is not positive.
    """
    batches.check_normalizing_factor('ClassificationModel', loss_normalizing_factor)
    self.backbone = as_backbone(backbone)
    self.head = head
    self.module = ClassificationModule(self.backbone, head)
    self.optimizer_def = optimizer_def
    self.train_integrator = train_integrator
    self.eval_integrator = eval_integrator
    self.loss_normalizing_factor = loss_normalizing_factor
    self.eval_seed = eval_seed
    self.shared_draws = shared_draws

  @property
  def FEATURE_CONVERTER_CLS(self):  # noqa: N802, t5x's name
    """What t5x turns a seqio task's features into batches with."""
    # Imported when t5x asks: it needs seqio and so TensorFlow, which nothing else of a model does.
    from het_plugin.data import ImageFeatureConverter

    return ImageFeatureConverter

  def validate(self, task_info: Any) -> None:
    """Checks that the head fits the task.

    Args:
      task_info: `data.TaskInfo`, of which `num_classes` and `multi_label` are read. The backbone
        takes the number of channels from the images.

    Raises:
      ValueError: naming the setting that does not fit.
    """
    if getattr(task_info, 'num_classes', None) is None:
      raise ValueError(
        'the images of the task have captions, no class labels: ClassificationModel cannot fit it'
      )
    name = type(self.head).__name__
    if self.head.num_classes != task_info.num_classes:
      raise ValueError(
        f'{name}.num_classes={self.head.num_classes} must be the number of classes of the task, '
        f'{task_info.num_classes}'
      )
    if task_info.multi_label and self.head.link == 'softmax':
      raise ValueError(f"{name}.link='softmax' cannot fit a multi-label task: bind link='sigmoid'")

  def get_initial_variables(
    self,
    rng: jax.Array,
    input_shapes: Mapping[str, Sequence[int]],
    input_types: Mapping[str, Any] | None = None,
  ) -> dict[str, PyTree]:
    """Initial 'params', float32, and their logical axes, 'params_axes'.

    Args:
      rng: PRNG key.
      input_shapes: of which 'image' is read, (B, H, W, C).
      input_types: dtypes, float32 where absent.

    Raises:
      ValueError: the backbone has mutable collections, or returns something else than phi [B, D].
    """
    dtype = (input_types or {}).get('image', jnp.float32)
    return with_axes(self.module.init(rng, jnp.zeros(tuple(input_shapes['image']), dtype)))

  def loss_fn(
    self, params: PyTree, batch: Batch, dropout_rng: jax.Array | None
  ) -> tuple[jax.Array, Metrics]:
    """Training loss and metrics.

    Pass every microbatch of a step the same `dropout_rng`: noise then follows the examples, and
    dropout the first example of the microbatch.

    Args:
      params: as of `get_initial_variables`.
      batch: see the module docstring.
      dropout_rng: key of the step; None is t5x's deterministic mode, the same as `eval_fn`.

    Returns:
      The scalar loss and the metrics of `metrics.base_metrics`. The training precision@1 is that of
      the noise-free logits: the predictive distribution would take a second pass over the samples.
    """
    if dropout_rng is None:
      return self.eval_fn(params, batch)
    index, mask = batches.index(batch), batches.mask(batch)
    dropout_rng, noise_rng = jax.random.split(dropout_rng)
    rngs = {'dropout': jax.random.fold_in(dropout_rng, index[0])}
    logits, _ = self.module.apply({'params': params}, batch['image'], train=True, rngs=rngs)
    nll = self.train_integrator.nll(logits, batch['label'], self._keys(noise_rng, batch))
    correct = metrics_lib.is_listed(_top_location(logits), batch['label'])
    return (
      self._loss(nll, mask),
      metrics_lib.base_metrics(nll, correct, logits.temperature, mask),
    )

  def eval_fn(self, params: PyTree, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Loss and metrics of the predictive distribution: `metrics.base_metrics` and 'ece'."""
    labels, mask = batch['label'], batches.mask(batch)
    logits, _ = self._logits(params, batch)
    log_prob = self._log_prob(logits, batch)
    top, top_log_prob = jnp.argmax(log_prob, -1), jnp.max(log_prob, -1)  # [B]
    if logits.link == 'softmax':
      nll = metrics_lib.label_nll(log_prob, labels)
    else:  # log(1 - p) cannot be had from log p near p = 1: integrate both signs
      nll = self.eval_integrator.nll(logits, labels, self._eval_keys(batch))
    correct = metrics_lib.is_listed(top, labels)
    metrics = metrics_lib.base_metrics(nll, correct, logits.temperature, mask)
    metrics['ece'] = metrics_lib.ExpectedCalibrationError.from_model_output(
      jnp.exp(top_log_prob), correct, mask=mask
    )
    return self._loss(nll, mask), metrics

  def predict_batch(self, params: PyTree, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
    """The most probable class of each example, int32 [B, 1]; `rng` as in predict_batch_with_aux."""
    return self.predict_batch_with_aux(params, batch, rng)[0]

  def predict_batch_with_aux(
    self, params: PyTree, batch: Batch, rng: jax.Array | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The most probable classes of each example.

    Args:
      params: as of `get_initial_variables`.
      batch: see the module docstring.
      rng: unused. t5x derives it from the number of the batch; predictions shall not depend on
        how examples are batched.

    Returns:
      The most probable class, int32 [B, 1]; and 'log_prob' [B, 1], its log-probability, and 'top5'
      int32 [B, min(5, K)], the most probable classes in order.
    """
    del rng
    logits, _ = self._logits(params, batch)
    log_prob = self._log_prob(logits, batch)
    top = _top_k(log_prob, min(5, logits.num_classes))
    return top[:, :1], {'log_prob': log_prob.max(-1, keepdims=True), 'top5': top}

  def score_batch(
    self, params: PyTree, batch: Batch, return_intermediates: bool = False
  ) -> jax.Array | tuple[jax.Array, dict[str, tuple[jax.Array]]]:
    """log p(y | x) of each example, float32 [B].

    With `return_intermediates` also the backbone's representations by name, each a tuple of one
    array as t5x returns them.
    """
    logits, intermediates = self._logits(params, batch)
    scores = -self.eval_integrator.nll(logits, batch['label'], self._eval_keys(batch))
    if return_intermediates:
      return scores, {name: (value,) for name, value in intermediates.items()}
    return scores

  def logits(self, params: PyTree, batch: Batch) -> GaussianLogits:
    """The head's Gaussian over the logits of each example, without dropout."""
    return self._logits(params, batch)[0]

  def predictive(self, params: PyTree, batch: Batch) -> dict[str, jax.Array]:
    """The predictive distribution of each example, by `eval_integrator`.

    Returns:
      'log_prob' float32 [B, K]: log p(k | x); sigmoid: log p(y_k = 1 | x).
      'expected_entropy' float32 [B]: as `Integrator.expected_entropy`; only of a heteroscedastic
        head that is sampled.
      'nll' float32 [B]: only with a sigmoid link, whose -log p(labels | x) float32 cannot give
        from log_prob where p is near 1.
    """
    logits, keys = self.logits(params, batch), self._eval_keys(batch)
    predictive = {'log_prob': self._log_prob(logits, batch)[:, : logits.num_classes]}
    if logits.covariance is not None and isinstance(self.eval_integrator, Integrator):
      predictive['expected_entropy'] = self.eval_integrator.expected_entropy(logits, keys)
    if logits.link == 'sigmoid':
      predictive['nll'] = self.eval_integrator.nll(logits, batch['label'], keys)
    return predictive

  def representations(
    self, params: PyTree, batch: Batch, layers: Sequence[str] = ('pre_logits',)
  ) -> dict[str, jax.Array]:
    """The backbone's representations [B, ...] of the given names.

    Raises:
      ValueError: for an unknown name.
    """
    return batches.representations(self.backbone, params['backbone'], batch, layers)

  def pre_logits_dim(self, params_shapes: PyTree) -> int:
    """D, of which a plain flax module says nothing: then the length of the head's matrices."""
    if (stated := getattr(self.backbone, 'pre_logits_dim', None)) is not None:
      return stated
    head = traverse_util.flatten_dict(params_shapes['head'])
    return next(x.shape[0] for path, x in head.items() if path[-1] in ('kernel', 'd_kernel'))

  def count_params(self, params_shapes: PyTree) -> ParamCounts:
    """Counts parameters exactly; `params_shapes` is the tree of params or of their shapes."""
    width = self.pre_logits_dim(params_shapes)
    return ParamCounts(
      backbone=sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params_shapes['backbone'])),
      head=self.head.num_params(width),
      extra=self.head.extra_params(width),
    )

  def _logits(self, params, batch):
    return self.module.apply({'params': params}, batch['image'])

  def _eval_keys(self, batch):
    return self._keys(jax.random.key(self.eval_seed), batch)

  def _keys(self, key, batch):
    return shared_key(key) if self.shared_draws else example_keys(key, batches.index(batch))

  def _log_prob(self, logits, batch):
    return self.eval_integrator.log_prob(logits, self._eval_keys(batch))  # [B, Kp]

  def _loss(self, nll, mask):
    return batches.mean_loss(nll, mask, self.loss_normalizing_factor)


def _top_location(logits):
  """The class of the largest location, int32 [B]; padded classes have one too and must not win."""
  real = jnp.arange(logits.location.shape[-1]) < logits.num_classes
  return jnp.argmax(jnp.where(real, logits.location, -jnp.inf), axis=-1)


def _top_k(log_prob, k):
  """The k most probable classes in order, int32 [B, k], from log_prob [B, Kp].

  A sharded `lax.top_k` gathers all classes of all examples on every device; argmax does not.
  """
  classes = jnp.arange(log_prob.shape[-1])
  top = []
  for _ in range(k):
    top.append(jnp.argmax(log_prob, axis=-1))
    log_prob = jnp.where(classes == top[-1][:, None], -jnp.inf, log_prob)
  return jnp.stack(top, axis=-1)
