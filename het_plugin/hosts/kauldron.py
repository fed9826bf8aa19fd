"""Heads in Kauldron (https://github.com/google-research/kauldron): docs/kauldron.md.

    layers = [backbone, het.Head(HetXL(num_classes=10))]
    cfg.model = kd.nn.Sequential(inputs='batch.image', layers=layers)
    cfg.train_losses = {'nll': het.Nll(labels='batch.label')}

Metrics that Kauldron has, such as `kd.metrics.Accuracy`, read 'preds.logits' unchanged.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import checkify
from kauldron import kd, kontext

from het_plugin.heads.predictive import (
  check_integrator,
  predictive_logits,
  row_keys,
)
from het_plugin.integrate import AnyIntegrator, GaussianLogits, Integrator
from het_plugin.measures import uncertainty

if TYPE_CHECKING:
  from het_plugin.data.reader import ExampleReader


class Head(nn.Module):
  """A head as the last layer of a model: pre-logits phi [B, D] to what losses and metrics read.

  The result is a dict, so that below the model's 'preds' there are
    logits: float32 [B, K], the predictive distribution as logits (`heads.predictive_logits`).
    gaussian: the `GaussianLogits` of the head, for `Nll`.
    keys: the typed PRNG keys [B] of the noise, for `Nll`.

  In training, the keys come from a stream of `cfg.rng_streams`, so they depend on `cfg.seed`, the
  step and the row. In evaluation they depend on the row alone, unless the stream has `eval=True`.

  Attributes:
    head: `Det`, `Het`, `HetH`, `HetXL`, or another module that returns `GaussianLogits`.
    integrator: estimates `logits`. A step that writes no metrics does not compute them.
    rng_stream: name of the stream.
    inputs: key of phi; needed only if this is the whole model.
  """

  head: nn.Module
  integrator: AnyIntegrator = Integrator()
  rng_stream: str = 'default'
  inputs: kontext.Key = kontext.REQUIRED

  is_training = kd.nn.train_property()

  def __post_init__(self) -> None:
    if not isinstance(self.head, nn.Module):
      raise ValueError(f'Head.head={self.head!r} must be a linen module: HetXL(num_classes=1000)')
    check_integrator('Head', self.integrator)
    super().__post_init__()

  def __call__(self, inputs: jax.Array) -> dict[str, jax.Array | GaussianLogits]:
    has_rng = self.has_rng(self.rng_stream)
    if self.is_training and not has_rng:
      raise ValueError(
        f'Head.rng_stream={self.rng_stream!r} is no rng stream of the training: take one of '
        "cfg.rng_streams that has train=True, such as 'default'"
      )
    key = self.make_rng(self.rng_stream) if has_rng else jax.random.key(0)
    keys = row_keys(key, inputs.shape[0])
    gaussian = self.head(inputs)
    if not isinstance(gaussian, GaussianLogits):
      raise ValueError(
        f'Head.head={type(self.head).__name__} must return GaussianLogits, as Det, Het, HetH and '
        'HetXL do'
      )
    logits = predictive_logits(gaussian, self.integrator, keys)
    return {'logits': logits, 'gaussian': gaussian, 'keys': keys}


@struct.dataclass
class MaskedMean(kd.losses.Loss.State):
  """The mean of a loss without the rows whose mask is 0; Kauldron's multiplies a NaN by it."""

  @classmethod
  def from_values(
    cls, values: jax.Array, mask: jax.Array | None = None, **settings: Any
  ) -> 'MaskedMean':
    if mask is not None:
      values = jnp.where(mask > 0, values, 0.0)
    return super().from_values(values=values, mask=mask, **settings)


@dataclasses.dataclass(eq=True, frozen=True, kw_only=True)
class Nll(kd.losses.Loss):
  """The negative log-likelihood of labels (`Integrator.nll`), with samples placed by the label.

  Its values are float32 [B, 1], so a mask is [B, 1] as for Kauldron's own losses. Rows whose mask
  is 0 have no part in the loss, whatever their labels are. For the gradient of the parameters phi
  must be finite there, too.

  Attributes:
    labels: key of class ids, int [B, L] padded with -1, [B, 1] for one label.
    gaussian: key of the `GaussianLogits` of `Head`.
    keys: key of the PRNG keys of `Head`.
    integrator: `Integrator` or `Location`.
  """

  labels: kontext.Key = kontext.REQUIRED
  gaussian: kontext.Key = 'preds.gaussian'
  keys: kontext.Key = 'preds.keys'
  integrator: AnyIntegrator = Integrator()

  State: ClassVar[type[MaskedMean]] = MaskedMean

  def __post_init__(self) -> None:
    check_integrator('Nll', self.integrator)

  def get_values(self, labels: jax.Array, gaussian: GaussianLogits, keys: jax.Array) -> jax.Array:
    """Values [B, 1]; NaN where a label is not below K, which checkify's user checks name.

    Raises:
      ValueError: `gaussian` is no `GaussianLogits`, or `labels` are no class ids [B, L].
    """
    if not isinstance(gaussian, GaussianLogits):
      raise ValueError(
        f'Nll.gaussian={self.gaussian!r} must be the GaussianLogits of Head; it is '
        f'{type(gaussian).__name__}'
      )
    is_ids = jnp.issubdtype(labels.dtype, jnp.integer) and labels.ndim == 2
    if not is_ids or len(labels) != len(keys):
      raise ValueError(
        f'Nll.labels={self.labels!r} must be class ids, int [B, L] with B = {len(keys)}; they are '
        f'{labels.dtype} {list(labels.shape)}'
      )
    checkify.debug_check(
      labels.max() < gaussian.num_classes,
      f'Nll.labels={self.labels!r} must be below K = {gaussian.num_classes} of the head; '
      'the largest is {largest}',
      largest=labels.max(),
    )
    return self.integrator.nll(gaussian, labels, keys)[:, None]


@dataclasses.dataclass(kw_only=True, frozen=True, eq=True)
class CalibrationError(kd.metrics.Metric):
  """The expected calibration error of a softmax (Guo et al. 2017, eq. 3, 15 bins of equal width).

  Attributes:
    labels: key of class ids, int [B, 1].
    logits: key of logits, float [B, K].
    mask: key of a mask, bool or float [B, 1]; rows with 0 do not count.
  """

  labels: kontext.Key = kontext.REQUIRED
  logits: kontext.Key = 'preds.logits'
  mask: kontext.Key | None = None

  @struct.dataclass
  class State(kd.metrics.AutoState['CalibrationError']):
    """Confidence and correctness of each example."""

    confidence: jax.Array = kd.metrics.concat_field()  # [B]
    correct: jax.Array = kd.metrics.concat_field()  # [B]
    mask: jax.Array = kd.metrics.concat_field()  # [B]

    def compute(self) -> float:
      counts = self.mask > 0
      return uncertainty.reliability(self.confidence[counts], self.correct[counts]).ece

  def get_state(
    self, labels: jax.Array, logits: jax.Array, mask: jax.Array | None = None
  ) -> 'CalibrationError.State':
    if labels.shape != (len(logits), 1):
      raise ValueError(
        f'CalibrationError.labels={self.labels!r} must be [B, 1] with B = {len(logits)}; they are '
        f'{list(labels.shape)}'
      )
    mask = jnp.ones_like(labels) if mask is None else mask
    # Of m equally probable classes each is the answer with probability 1 / m.
    is_top = logits == logits.max(-1, keepdims=True)
    hit = jnp.take_along_axis(is_top, labels, axis=1)[:, 0]
    return self.State(
      confidence=jax.nn.softmax(logits).max(-1),
      correct=hit / is_top.sum(-1),
      mask=mask[:, 0],
    )


@dataclasses.dataclass(frozen=True)
class Task(kd.data.py.DataSourceBase):
  """Images of a task of ours (docs/data.md), as `kd.data.py.Tfds` is of one of TFDS.

  An example has image float32 [H, H, C] in [-1, 1], label int32 [L] padded with -1, and mask
  float32 [1], 0 if the image is unreadable. Nothing is augmented. Needs the extra `train`.

  Attributes:
    name: 'digits', 'npz:PATH', 'image_folder:PATH' and so on.
    split: a split or a slice of it.
    size: H.
  """

  name: str
  _: dataclasses.KW_ONLY
  split: str
  size: int

  @functools.cached_property
  def data_source(self) -> '_Examples':
    from het_plugin.data import tasks

    task = tasks.get_task(self.name)
    if task.vocabulary is not None or task.info.label_fields:
      raise ValueError(f'Task.name={self.name!r} must have class labels, without weights')
    lengths = {'image': self.size, 'label': task.info.max_labels}
    reader = task.reader(self.split, lengths, augment=False, shuffle=False, seed=0, num_epochs=1)
    if reader.num_examples is None:
      raise ValueError(f'Task.split={self.split!r} of {self.name!r} is endless: take one that ends')
    return _Examples(reader)


@dataclasses.dataclass(frozen=True)
class _Examples:
  """The random access of grain to a reader."""

  reader: 'ExampleReader'

  def __len__(self) -> int:
    return self.reader.num_examples

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    batch, _ = self.reader.read(np.array([index]))
    return {'image': batch['image'][0], 'label': batch['label'][0], 'mask': batch['mask']}
