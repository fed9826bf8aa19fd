"""Image classification with the model interface of t5x, for its trainer and the built-in one.

B examples, K classes (Kp with padding), D pre-logits, L labels. A batch has image [B, H, W, C] and
label int32 [B, L], padded with -1, and may have `batches.index` and `batches.mask`.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from clu import parameter_overview
from flax import linen as nn
from flax import traverse_util

from het_plugin import heads
from het_plugin.backbones import as_backbone, with_axes
from het_plugin.integrate import (
  AnyIntegrator,
  GaussianLogits,
  Integrator,
  Location,
  example_keys,
  shared_key,
  top_class,
)
from het_plugin.models import batches, soft_labels
from het_plugin.models import metrics as metrics_lib
from het_plugin.system import ranges
from het_plugin.system.ranges import Positive, Rate

Batch = batches.Batch
Metrics = dict[str, clu_metrics.Metric]
PyTree = Any


class ClassificationModule(nn.Module):
  """Backbone and head; the parameters are {'backbone': ..., 'head': ...}, or those of the head only
  where the backbone has none.
  """

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
  """Exact numbers of parameters, without padded classes."""

  backbone: int
  head: int
  extra: int  # of the head beyond those of a deterministic head with a fixed temperature

  def __str__(self) -> str:
    return (
      f'{self.backbone:,} in the backbone, {self.head:,} in the head ({self.extra:,} more than DET)'
    )

  @property
  def total(self) -> int:
    return self.backbone + self.head


class ClassificationModel:
  """A backbone and a head, trained by maximum likelihood.

      >>> import jax, jax.numpy as jnp
      >>> from het_plugin import backbones, heads, integrate, models
      >>> head, rule = heads.HetXL(num_classes=3, num_factors=2), integrate.Integrator()
      >>> model = models.ClassificationModel(backbones.Mlp((8,)), head, None, rule, rule)
      >>> params = model.get_initial_variables(jax.random.key(0), {'image': (2, 1, 1, 4)})['params']
      >>> batch = {'image': jnp.ones((2, 1, 1, 4)), 'label': jnp.array([[0], [2]])}
      >>> loss, metrics = jax.jit(model.loss_fn)(params, batch, jax.random.key(1))
      >>> loss.shape, jax.jit(model.predict_batch)(params, batch).shape
      ((), (2, 1))

  The noise of an example depends on its index, or is the same for all examples (`shared_draws`).
  Without dropout, values therefore do not depend on mesh, hosts, batch size or number of
  microbatches. Training keys come from the step's `dropout_rng`. Evaluation, prediction and scoring
  use one fixed key, so they are functions of the parameters.
  """

  @ranges.checked
  def __init__(
    self,
    backbone: nn.Module,
    head: nn.Module,
    optimizer_def: Any,
    train_integrator: Integrator,
    eval_integrator: AnyIntegrator,
    loss_normalizing_factor: Positive | None = None,
    eval_seed: int = 0,
    shared_draws: bool = False,
    fixed_draws: bool = False,
    label_smoothing: Rate = 0.0,
  ):
    """Composes the model.

    Args:
      backbone: `backbone(image, train=False) -> (phi [B, D], {name: representation})` with the
        attribute `pre_logits_dim`, D, or any flax module image -> phi (`backbones.PlainBackbone`).
      head: `head(phi) -> GaussianLogits` with the attributes `num_classes` and `link` and the
        methods `num_params(D)` and `extra_params(D)`.
      optimizer_def: the trainer's optimizer.
      train_integrator: estimates the training loss.
      eval_integrator: estimates metrics, predictions and scores; `Location` leaves the noise out.
      loss_normalizing_factor: None for the mean loss over the real rows of a (micro)batch. A number
        divides the sum over rows instead: t5x sums the gradients of microbatches, so bind the
        global batch size there.
      eval_seed: seed of the noise outside training.
      shared_draws: whether all examples of a step, or of an evaluation, share the same normal
        draws. This saves time, but correlates the estimates of the examples, so their mean has more
        variance.
      fixed_draws: whether training repeats the same normal draws at every step. The loss is then a
        deterministic function of the parameters, which an exact loss is in any case.
      label_smoothing: share of the training target that is spread evenly (`soft_labels.targets`).
        It needs the log-probabilities of all classes.

    Raises:
      ValueError: loss_normalizing_factor is not positive, or label_smoothing not in [0, 1).
    """
    self.backbone = as_backbone(backbone)
    self.head = head
    self.module = ClassificationModule(self.backbone, head)
    self.optimizer_def = optimizer_def
    self.train_integrator: AnyIntegrator = train_integrator
    self.eval_integrator = eval_integrator
    self.loss_normalizing_factor = loss_normalizing_factor
    self.eval_seed = eval_seed
    self.shared_draws = shared_draws
    self.fixed_draws = fixed_draws
    self.label_smoothing = label_smoothing

  @property
  def FEATURE_CONVERTER_CLS(self):  # noqa: N802, t5x's name
    """The seqio feature converter with which t5x makes batches."""
    # Imported here, because only the converter needs seqio and TensorFlow.
    from het_plugin.data import ImageFeatureConverter

    return ImageFeatureConverter

  @property
  def explicit_axes(self) -> bool:
    """Whether it takes arrays of explicit shardings (`jax.sharding.AxisType`), as its backbone
    says; heads do.
    """
    return getattr(self.backbone, 'explicit_axes', False)

  def validate(self, task_info: Any) -> None:
    """Raises ValueError if the head does not fit the task, a `data.TaskInfo`."""
    if getattr(task_info, 'num_classes', None) is None:
      raise ValueError(
        'the images of the task have captions, no class labels: ClassificationModel cannot fit it'
      )
    name = type(self.head).__name__
    if not hasattr(self.head, 'num_classes'):
      raise ValueError(
        f'ClassificationModel.head={name} compares pairs of images and texts: take a head of '
        'classes, such as gin/heads/het_xl.gin'
      )
    if self.head.num_classes != task_info.num_classes:
      how = '' if task_info.class_names else ': without class_name, the largest label + 1'
      raise ValueError(
        f'{name}.num_classes={self.head.num_classes} must be the number of classes of the task, '
        f'{task_info.num_classes} (NUM_CLASSES){how}'
      )

  def get_initial_variables(
    self,
    rng: jax.Array,
    input_shapes: Mapping[str, Sequence[int]],
    input_types: Mapping[str, Any] | None = None,
  ) -> dict[str, PyTree]:
    """Initial 'params', float32, and their logical axes, 'params_axes', for input_shapes {'image':
    (B, H, W, C)} and input_types {'image': dtype}, float32 by default.
    """
    dtype = (input_types or {}).get('image', jnp.float32)
    return with_axes(self.module.init(rng, jnp.zeros(tuple(input_shapes['image']), dtype)))

  def loss_fn(
    self, params: PyTree, batch: Batch, dropout_rng: jax.Array | None
  ) -> tuple[jax.Array, Metrics]:
    """Training loss and metrics.

    All microbatches of a step get the same `dropout_rng`: noise is keyed by the index of each
    example, dropout by the index of the first example of the microbatch. None is t5x's
    deterministic mode, the same as `eval_fn`. What the backbone sows in 'losses' is added to the
    loss. The metrics are `metrics.base_metrics` and what it sows (`batches.apply_in_training`);
    precision_at_1 is computed from the logits without noise, because the predictive distribution
    would need a second pass over the samples.
    """
    if dropout_rng is None:
      return self.eval_fn(params, batch)
    index = batches.index(batch)
    mask = batches.mask(batch)
    dropout_rng, noise_rng = jax.random.split(dropout_rng)
    if self.fixed_draws:
      noise_rng = jax.random.key(0)
    # index[0], which jax 0.10 does not take where the rows have an explicit sharding
    first = jnp.where(jnp.arange(len(index)) == 0, index, 0).sum()
    rngs = {'dropout': jax.random.fold_in(dropout_rng, first)}
    (logits, _), auxiliary_loss, auxiliary = batches.apply_in_training(
      self.module, params, batch['image'], rngs=rngs
    )
    keys = self._keys(noise_rng, batch)
    nll = soft_labels.nll(self.train_integrator, logits, batch, keys, self.label_smoothing)
    correct = soft_labels.correct(top_class(logits), batch, logits.link)
    nll_weighted = nll * batch.get('weight', 1.0)
    loss = batches.mean_loss(nll_weighted, mask, self.loss_normalizing_factor, auxiliary_loss)
    return loss, metrics_lib.base_metrics(nll, correct, logits.temperature, mask) | auxiliary

  def eval_fn(self, params: PyTree, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Loss, `metrics.base_metrics` and 'ece' of the predictive distribution; where softmax labels
    are votes or soft, also 'disagreement', its rank correlation with people's.
    """
    mask = batches.mask(batch)
    logits, _ = self._logits(params, batch)
    has_votes = 'label_weight' in batch or batch['label'].shape[-1] > 1
    has_shares = logits.link == 'softmax' and has_votes
    if 'label_weight' not in batch and not has_shares and self.eval_integrator.is_tiled(logits):
      nll, correct, confidence = self._scores_in_tiles(logits, batch)
    else:
      log_prob = self._log_prob(logits, batch)
      target = soft_labels.targets(batch, logits)
      if logits.link == 'sigmoid':  # near p = 1, log(1 - p) cannot be computed from log p
        nll = soft_labels.nll(self.eval_integrator, logits, batch, self._eval_keys(batch))
      else:
        nll = jnp.where(target == 0, 0.0, -target * log_prob).sum(-1)
      correct = soft_labels.right(log_prob, target)
      confidence = jnp.exp(log_prob.max(-1))
    metrics = metrics_lib.base_metrics(nll, correct, logits.temperature, mask)
    metrics['ece'] = metrics_lib.ExpectedCalibrationError.from_model_output(
      confidence, correct, mask=mask
    )
    if has_shares:
      metrics['disagreement'] = metrics_lib.DisagreementCorrelation.from_model_output(
        log_prob, target, logits.num_classes, mask
      )
    return batches.mean_loss(nll, mask, self.loss_normalizing_factor), metrics

  def predict_batch(self, params: PyTree, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
    """The most probable class of each example, int32 [B, 1]; `rng` as in predict_batch_with_aux."""
    return self.predict_batch_with_aux(params, batch, rng)[0]

  def predict_batch_with_aux(
    self, params: PyTree, batch: Batch, rng: jax.Array | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The most probable class of each example, int32 [B, 1], and a dict with its log-probability
    'log_prob' [B, 1] and the most probable classes in order, 'top5' int32 [B, min(5, K)].

    `rng` is unused: t5x derives it from the number of the batch, and predictions must not depend on
    how examples are batched.
    """
    del rng
    logits, _ = self._logits(params, batch)
    keys = self._eval_keys(batch)
    top, log_prob = self.eval_integrator.top_k(logits, keys, min(5, logits.num_classes))
    return top[:, :1], {'log_prob': log_prob[:, :1], 'top5': top}

  def score_batch(
    self, params: PyTree, batch: Batch, return_intermediates: bool = False
  ) -> jax.Array | tuple[jax.Array, dict[str, tuple[jax.Array]]]:
    """log p(y | x) of each example, float32 [B].

    With `return_intermediates` also the backbone's representations by name, each as a tuple of one
    array as in t5x.
    """
    logits, intermediates = self._logits(params, batch)
    scores = -soft_labels.nll(self.eval_integrator, logits, batch, self._eval_keys(batch))
    if return_intermediates:
      return scores, {name: (value,) for name, value in intermediates.items()}
    return scores

  def logits(self, params: PyTree, batch: Batch) -> GaussianLogits:
    """The Gaussian over the logits of each example, without dropout."""
    return self._logits(params, batch)[0]

  def without_noise(self) -> 'ClassificationModel':
    """The model of the same parameters that leaves the noise out, in training and after it: DET.

    The parameters of the noise have no gradient in it.
    """
    model = copy.copy(self)
    model.train_integrator = model.eval_integrator = Location()
    return model

  def location_top(self, params: PyTree, batch: Batch) -> jax.Array:
    """The class with the largest location of each example, without the noise, int32 [B]."""
    return top_class(self.logits(params, batch))

  def predictive(self, params: PyTree, batch: Batch) -> dict[str, jax.Array]:
    """The predictive distribution of each example, estimated by `eval_integrator`.

    Returns:
      'log_prob' float32 [B, K]: log p(k | x), or log p(y_k = 1 | x) with the sigmoid link.
      'expected_entropy' float32 [B]: see `Integrator.expected_entropy`; only for a heteroscedastic
        head and a sampling integrator.
      'nll' float32 [B]: -log p(labels | x); only with the sigmoid link, where it cannot be computed
        from log_prob for p near 1.
    """
    logits = self.logits(params, batch)
    keys = self._eval_keys(batch)
    predictive = {'log_prob': self._log_prob(logits, batch)[:, : logits.num_classes]}
    if logits.covariance is not None and isinstance(self.eval_integrator, Integrator):
      predictive['expected_entropy'] = self.eval_integrator.expected_entropy(logits, keys)
    if logits.link == 'sigmoid':
      predictive['nll'] = soft_labels.nll(self.eval_integrator, logits, batch, keys)
    return predictive

  def served(
    self, params: PyTree, image: jax.Array, *, entropies: bool = False
  ) -> dict[str, jax.Array]:
    """Results of an exported program for images [B, H, W, C], as in `heads.served`.

    It is the predictive distribution of `shared_draws`.
    """
    logits = self.logits(params, {'image': image})
    return heads.served(logits, self.eval_integrator, entropies=entropies, seed=self.eval_seed)

  def representations(
    self, params: PyTree, batch: Batch, layers: Sequence[str] = ('pre_logits',)
  ) -> dict[str, jax.Array]:
    """The backbone's representations [B, ...] with the given names."""
    return batches.representations(self.backbone, params.get('backbone', {}), batch, layers)

  def pre_logits_dim(self, params_shapes: PyTree) -> int:
    """D, as stated by the backbone, or from the head's matrices for a plain flax module."""
    if (stated := getattr(self.backbone, 'pre_logits_dim', None)) is not None:
      return stated
    head = traverse_util.flatten_dict(params_shapes['head'])
    return next(x.shape[0] for path, x in head.items() if path[-1] in ('kernel', 'd_kernel'))

  def count_params(self, params_shapes: PyTree) -> ParamCounts:
    """Exact numbers of parameters, from a tree of parameters or of their shapes."""
    width = self.pre_logits_dim(params_shapes)
    return ParamCounts(
      backbone=int(parameter_overview.count_parameters(params_shapes.get('backbone', {}))),
      head=self.head.num_params(width),
      extra=self.head.extra_params(width),
    )

  def _logits(self, params: PyTree, batch: Batch) -> tuple[GaussianLogits, dict[str, jax.Array]]:
    """The Gaussian over the logits, and the backbone's representations by name."""
    outputs = self.module.apply({'params': params}, batch['image'])
    return cast('tuple[GaussianLogits, dict[str, jax.Array]]', outputs)

  def _eval_keys(self, batch: Batch) -> jax.Array:
    return self._keys(jax.random.key(self.eval_seed), batch)

  def _keys(self, key: jax.Array, batch: Batch) -> jax.Array:
    return shared_key(key) if self.shared_draws else example_keys(key, batches.index(batch))

  def _log_prob(self, logits: GaussianLogits, batch: Batch) -> jax.Array:
    return self.eval_integrator.log_prob(logits, self._eval_keys(batch))  # [B, Kp]

  def _scores_in_tiles(
    self, logits: GaussianLogits, batch: Batch
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The NLL, whether the most probable class is right, and its probability, each [B], without an
    array of all classes; of equally probable classes the first counts.
    """
    integrator = self.eval_integrator
    if isinstance(integrator, Integrator):  # one distribution for all: the samples of `log_prob`
      integrator = dataclasses.replace(integrator, tilt=False)
    keys = self._eval_keys(batch)
    nll = integrator.nll(logits, batch['label'], keys)
    top, log_prob = integrator.top_k(logits, keys, 1)
    correct = soft_labels.correct(top[:, 0], batch, logits.link)
    return nll, correct, jnp.exp(log_prob[:, 0])
