"""Contrastive learning of images and texts with the model interface of t5x (section 5).

It follows LiT (Zhai et al., 2022, https://arxiv.org/abs/2111.07991). B pairs, D dimensions of the
common space, L token ids per text, K classes. A batch has image [B, H, W, C] and text int32 [B, L],
padded with 0, and may have `batches.index` and `batches.mask`.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from clu import parameter_overview
from flax import linen as nn

from het_plugin.backbones import TextTransformer, as_backbone, with_axes
from het_plugin.backbones.layers import Dense
from het_plugin.heads import BatchSoftmax, Pairs, class_log_prob, contrastive_nll
from het_plugin.integrate import Integrator, example_keys
from het_plugin.models import batches
from het_plugin.models.classification import ParamCounts
from het_plugin.system import ranges
from het_plugin.system.ranges import Count, Positive

Batch = batches.Batch
Metrics = dict[str, clu_metrics.Metric]
PyTree = Any


class ContrastiveModule(nn.Module):
  """Two towers, their projections and a head.

  The parameters are {'backbone', 'image_projection', 'text_tower', 'text_projection', 'head'}. The
  image tower is called 'backbone' as in a classifier, so that a classifier's checkpoint fits.

  Attributes:
    backbone: the image tower.
    text_tower: the text tower.
    head: maps representations alpha, beta [B, D] to `Pairs`.
    embedding_dim: D; both towers are projected to it. None uses the image tower's output as it is
      and projects texts to its width.
    locked: whether the image tower gets no gradient and no dropout. Its projection is trained.
  """

  backbone: nn.Module
  text_tower: nn.Module
  head: nn.Module
  embedding_dim: int | None = None
  locked: bool = False

  def setup(self):
    # 'kv', because t5x's rules replicate it: every row of the batch is compared with all of D.
    if self.embedding_dim is not None:
      self.image_projection = Dense(self.embedding_dim, ('embed', 'kv'))
    self.text_projection = Dense(self.dim, ('embed', 'kv'))

  @property
  def dim(self) -> int:
    """D."""
    return self.backbone.pre_logits_dim if self.embedding_dim is None else self.embedding_dim

  def __call__(self, image: jax.Array, text: jax.Array, train: bool = False) -> Pairs:
    """image [B, H, W, C], text [B, L] -> the head's pairs."""
    return self.head(self.embed_image(image, train), self.embed_text(text, train))

  def embed_image(self, image: jax.Array, train: bool = False) -> jax.Array:
    """image [B, H, W, C] -> alpha [B, D], the input of the head."""
    phi, _ = self.backbone(image, train=train and not self.locked)
    if self.locked:
      phi = jax.lax.stop_gradient(phi)
    return phi if self.embedding_dim is None else self.image_projection(phi)

  def embed_text(self, text: jax.Array, train: bool = False) -> jax.Array:
    """text [B, L] -> beta [B, D], the input of the head."""
    return self.text_projection(self.text_tower(text, train=train)[0])


class ContrastiveModel:
  """Two towers and a contrastive head, trained by the symmetric batch softmax (eq. 6, 8).

  Each pair is compared with the whole batch on all devices, so a batch cannot be cut into
  microbatches. The noise of a pair depends on its index: without dropout, values do not depend on
  mesh or hosts. Outside training there is no noise, as in the paper (appendix M), unless an
  `eval_integrator` is given; it uses one fixed key.
  """

  needs_whole_batch = True

  @ranges.checked
  def __init__(
    self,
    backbone: nn.Module,
    text_tower: nn.Module,
    head: nn.Module,
    optimizer_def: Any,
    train_integrator: Integrator,
    eval_integrator: Integrator | None = None,
    embedding_dim: Count | None = None,
    locked: bool = False,
    loss_normalizing_factor: Positive | None = None,
    eval_seed: int = 0,
  ):
    """Composes the model.

    Args:
      backbone: the image tower, `backbone(image, train=False) -> (phi [B, D], {name:
        representation})` with the attribute `pre_logits_dim`; or any flax module image -> phi if
        embedding_dim is set.
      text_tower: `text_tower(text, train=False)` with the same result and the attributes
        `pre_logits_dim` and `vocab_size`.
      head: `head(alpha, beta) -> Pairs` with the methods `num_params(D)` and `extra_params(D)`.
      optimizer_def: the trainer's optimizer.
      train_integrator: integrates over the noise in training; one sample in the paper (appendix
        N.2).
      eval_integrator: the same in `eval_fn` and `score_batch`; None for no noise.
      embedding_dim: D; None for the width of the image tower, which is then not projected.
      locked: whether the image tower gets no gradient. Also set adamw.frozen_params = '^backbone/',
        because weight decay would change its parameters.
      loss_normalizing_factor: as in ClassificationModel, with pairs as rows.
      eval_seed: seed of the noise outside training.

    Raises:
      ValueError: embedding_dim is below 1 or missing, an integrator is none, or
        loss_normalizing_factor is not positive.
    """
    if embedding_dim is None and getattr(backbone, 'pre_logits_dim', None) is None:
      raise ValueError(
        f'ContrastiveModel.embedding_dim must be set: {type(backbone).__name__} does not state the '
        'width of its output (pre_logits_dim)'
      )
    integrators = {'train_integrator': train_integrator, 'eval_integrator': eval_integrator}
    for name, integrator in integrators.items():
      if not isinstance(integrator, Integrator | None):
        raise ValueError(
          f'ContrastiveModel.{name}={integrator} must be an Integrator, or None for no noise'
        )
    self.backbone = as_backbone(backbone)
    self.text_tower = text_tower
    self.head = head
    self.module = ContrastiveModule(self.backbone, text_tower, head, embedding_dim, locked)
    self.optimizer_def = optimizer_def
    self.train_integrator: Integrator | None = train_integrator
    self.eval_integrator = eval_integrator
    self.loss_normalizing_factor = loss_normalizing_factor
    self.eval_seed = eval_seed

  @property
  def FEATURE_CONVERTER_CLS(self):  # noqa: N802, t5x's name
    """The seqio feature converter with which t5x makes batches."""
    # Imported here, because only the converter needs seqio and TensorFlow.
    from het_plugin.data import ImageTextFeatureConverter

    return ImageTextFeatureConverter

  def validate(self, task_info: Any) -> None:
    """Raises ValueError if the model does not fit the task, a `data.ImageTextInfo`.

    The task must have captions and a vocabulary no larger than that of the text tower.
    """
    vocab_size = getattr(task_info, 'vocab_size', None)
    if vocab_size is None:
      raise ValueError(
        'ContrastiveModel trains on images with captions; the task has class labels: choose one '
        'with captions, such as glyph_names'
      )
    if hasattr(self.head, 'num_classes'):
      raise ValueError(
        f'ContrastiveModel.head={type(self.head).__name__} has classes: take a head of pairs, '
        'gin/heads/contrastive_het_xl.gin or contrastive_det.gin'
      )
    if vocab_size > self.text_tower.vocab_size:
      raise ValueError(
        f'{type(self.text_tower).__name__}.vocab_size={self.text_tower.vocab_size} must be at '
        f'least {vocab_size}, the size of the vocabulary {task_info.vocabulary!r}'
      )

  def get_initial_variables(
    self,
    rng: jax.Array,
    input_shapes: Mapping[str, Sequence[int]],
    input_types: Mapping[str, Any] | None = None,
  ) -> dict[str, PyTree]:
    """Initial 'params', float32, and their logical axes, 'params_axes', for input_shapes {'image':
    (B, H, W, C), 'text': (B, L)} and input_types {'image': dtype}, float32 by default.
    """
    dtype = (input_types or {}).get('image', jnp.float32)
    image = jnp.zeros(tuple(input_shapes['image']), dtype)
    text = jnp.zeros(tuple(input_shapes['text']), jnp.int32)
    return with_axes(self.module.init(rng, image, text))

  def loss_fn(
    self, params: PyTree, batch: Batch, dropout_rng: jax.Array | None
  ) -> tuple[jax.Array, Metrics]:
    """Training loss and metrics.

    The loss is the mean over both directions and all pairs of the batch. The metrics are 'loss',
    'tau', 'logit_scale' (1 / tau) and, for each direction ('image_to_text', 'text_to_image'),
    'nll/...' and 'precision_at_1/...', the latter without noise. A `dropout_rng` of None is t5x's
    deterministic mode, the same as `eval_fn`.
    """
    if dropout_rng is None:
      return self.eval_fn(params, batch)
    dropout_rng, noise_rng = jax.random.split(dropout_rng)
    rngs = {'dropout': jax.random.fold_in(dropout_rng, batches.index(batch)[0])}
    pairs, auxiliary_loss, auxiliary = batches.apply_in_training(
      self.module, params, batch['image'], batch['text'], rngs=rngs
    )
    keys = example_keys(noise_rng, batches.index(batch))
    loss, metrics = self._loss_and_metrics(
      pairs, self.train_integrator, keys, batch, auxiliary_loss
    )
    return loss, metrics | auxiliary

  def eval_fn(self, params: PyTree, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Loss and metrics as in `loss_fn`; they depend on the size of the batch."""
    pairs = self.pairs(params, batch)
    return self._loss_and_metrics(pairs, self.eval_integrator, self._eval_keys(batch), batch)

  def predict_batch(self, params: PyTree, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
    """`image_embeddings`; `rng` as in predict_batch_with_aux."""
    return self.predict_batch_with_aux(params, batch, rng)[0]

  def predict_batch_with_aux(
    self, params: PyTree, batch: Batch, rng: jax.Array | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Embeddings without noise: of images, float32 [B, D], and of texts, {'text': [B, D]}.

    `rng` is unused.
    """
    del rng
    alpha, beta = self.pairs(params, batch).representations()
    return alpha, {'text': beta}

  def score_batch(
    self, params: PyTree, batch: Batch, return_intermediates: bool = False
  ) -> jax.Array | tuple[jax.Array, dict[str, tuple[jax.Array]]]:
    """log p of each pair among those of the batch, averaged over both directions, float32 [B].

    With `return_intermediates` also the image tower's representations by name, each as a tuple of
    one array as in t5x.
    """
    pairs = self.pairs(params, batch)
    keys = self._eval_keys(batch)
    mask = batches.mask(batch)
    scores = -_mean(contrastive_nll(pairs, self.eval_integrator, keys, mask))
    if not return_intermediates:
      return scores
    _, intermediates = self.backbone.apply({'params': params['backbone']}, batch['image'])
    return scores, {name: (value,) for name, value in intermediates.items()}

  def pairs(self, params: PyTree, batch: Batch) -> Pairs:
    """The input of the loss for a batch, without dropout."""
    return self._apply(params, batch['image'], batch['text'])

  def without_noise(self) -> 'ContrastiveModel':
    """The model of the same parameters that leaves the noise out, in training and after it: DET.

    The parameters of the noise have no gradient in it.
    """
    model = copy.copy(self)
    model.train_integrator = model.eval_integrator = None
    return model

  def image_embeddings(self, params: PyTree, batch: Batch) -> jax.Array:
    """Image embeddings, float32 [B, D]; similarity to `text_embeddings` is the dot product."""
    return self._image_pairs(params, batch).representations()[0]

  def text_embeddings(self, params: PyTree, text: jax.Array) -> jax.Array:
    """Embeddings of texts int32 [N, L], float32 [N, D]."""
    beta = self._apply(params, text, method='embed_text')
    return self._head(params, beta, beta).representations()[1]

  def class_log_prob(
    self, params: PyTree, batch: Batch, class_embeddings: jax.Array, num_samples: int
  ) -> jax.Array:
    """Zero-shot classification: log p(k | image), float32 [B, K].

    The K classes are given as text embeddings [K, D]. S samples of the noise of the image are
    averaged; 0 for no noise (appendix M).
    """
    pairs = self._image_pairs(params, batch)
    return class_log_prob(
      pairs.alpha,
      class_embeddings,
      pairs.temperature,
      pairs.image_to_text,
      Integrator(num_samples, sampler='sobol') if num_samples else None,
      self._eval_keys(batch),
      post_normalization=pairs.post_normalization,
      dtype=pairs.dtype,
    )

  def representations(
    self, params: PyTree, batch: Batch, layers: Sequence[str] = ('pre_logits',)
  ) -> dict[str, jax.Array]:
    """The image tower's representations [B, ...] with the given names."""
    return batches.representations(self.backbone, params['backbone'], batch, layers)

  def count_params(self, params_shapes: PyTree) -> ParamCounts:
    """Exact numbers of parameters, from a tree of parameters or of their shapes.

    Both towers and the projections count as the backbone; padded rows of the vocabulary do not
    count.
    """
    dim = self.module.dim
    towers = {name: tree for name, tree in params_shapes.items() if name != 'head'}
    total = int(parameter_overview.count_parameters(towers))
    if isinstance(self.text_tower, TextTransformer):
      rows, width = params_shapes['text_tower']['embedding'].shape
      total -= (rows - self.text_tower.vocab_size) * width
    return ParamCounts(
      backbone=total,
      head=self.head.num_params(dim),
      extra=self.head.extra_params(dim),
    )

  def _apply(self, params: PyTree, *inputs: jax.Array, **settings: Any) -> Any:
    return self.module.apply({'params': params}, *inputs, **settings)

  def _head(self, params: PyTree, alpha: jax.Array, beta: jax.Array) -> Pairs:
    pairs = self.head.apply({'params': params.get('head', {})}, alpha, beta)
    return cast('Pairs', pairs)

  def _image_pairs(self, params: PyTree, batch: Batch) -> Pairs:
    """Pairs with images on both sides; use only the image side."""
    alpha = self._apply(params, batch['image'], method='embed_image')
    return self._head(params, alpha, alpha)

  def _eval_keys(self, batch: Batch) -> jax.Array:
    return example_keys(jax.random.key(self.eval_seed), batches.index(batch))

  def _loss_and_metrics(
    self,
    pairs: Pairs,
    integrator: Integrator | None,
    keys: jax.Array,
    batch: Batch,
    auxiliary_loss: jax.Array | float = 0.0,
  ) -> tuple[jax.Array, Metrics]:
    mask = batches.mask(batch)
    directions = contrastive_nll(pairs, integrator, keys, mask)
    nll = _mean(directions)
    tau = pairs.temperature
    average = clu_metrics.Average.from_model_output
    metrics = {
      'loss': average(nll, mask=mask),
      'tau': clu_metrics.LastValue.from_model_output(tau[None]),
      'logit_scale': clu_metrics.LastValue.from_model_output(1.0 / tau[None]),
    }
    for name, direction in zip(('image_to_text', 'text_to_image'), directions, strict=True):
      metrics[f'nll/{name}'] = average(direction.nll, mask=mask)
      metrics[f'precision_at_1/{name}'] = average(direction.correct, mask=mask)
    return batches.mean_loss(nll, mask, self.loss_normalizing_factor, auxiliary_loss), metrics


def _mean(directions: tuple[BatchSoftmax, BatchSoftmax]) -> jax.Array:
  """The loss of each pair, [B]."""
  return (directions[0].nll + directions[1].nll) / 2
