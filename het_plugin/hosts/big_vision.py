"""Our heads on the image models of big_vision (https://github.com/google-research/big_vision):
docs/big_vision.md.

big_vision imports `big_vision.models.{config.model_name}`. This module registers itself there as
'het', so that a config file that imports it can name it, and big_vision's code stays as it is. The
loss of a model with `loss_samples` becomes `big_vision.utils.het_nll`, for `config.loss`.
"""

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from het_plugin.heads import HEADS, FixedTemperature, LearnedTemperature, PredictiveLogits, row_keys
from het_plugin.integrate import GaussianLogits, Integrator

# W keeps the shape [D, K] of big_vision's last layer, and a function is no value of a config.
_NOT_SETTINGS = ('num_classes', 'class_multiple', 'get_logits', 'parent', 'name')

sys.modules['big_vision.models.het'] = sys.modules[__name__]

# `big_vision.utils.sync`, the last statement of its train.py, needs a class that jax 0.7 removed.
# Without it a run that is complete ends with exit code 1.
if not hasattr(jax.sharding, 'PositionalSharding'):
  jax.sharding.PositionalSharding = lambda devices: NamedSharding(
    Mesh(devices, ('all',)), PartitionSpec('all')
  )


@struct.dataclass
class TrainingLogits:
  """Output of a model with `loss_samples` in training, which `het_nll` reads.

  Attributes:
    gaussian: the `GaussianLogits` of B images.
    keys: typed PRNG keys [B] of the noise.
    integrator: of the loss.
  """

  gaussian: GaussianLogits
  keys: jax.Array
  integrator: Integrator = struct.field(pytree_node=False)


def het_nll(
  *, logits: TrainingLogits | jax.Array, labels: jax.Array, reduction: bool = True
) -> jax.Array:
  """The softmax cross-entropy whose samples follow the label (`Integrator.nll`).

  Args:
    logits: of the model: in training `TrainingLogits`, in evaluation log p [B, K].
    labels: [B, K], one 1 and zeros. In training the loss of other rows is NaN, at which train.py
      stops: with mixup or label smoothing take `softmax_xent` without `loss_samples`.
    reduction: whether to return the mean.

  Returns:
    [B] in nats, or its mean.
  """
  if isinstance(logits, TrainingLogits):
    is_one_label = (labels.max(-1) == 1) & (labels.sum(-1) == 1)
    nll = logits.integrator.nll(logits.gaussian, labels.argmax(-1), logits.keys)
    nll = jnp.where(is_one_label, nll, jnp.nan)
  else:
    nll = -jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1)
  return nll.mean() if reduction else nll


class HeadModel(nn.Module):
  """An image model of big_vision without its last layer, then a head of ours.

  The parameters of the model keep their paths, and those of the head are below 'head', where
  big_vision's models have W and b too. So its checkpoints, `init_head_bias`, `dont_load`,
  `lr_mults` and `wd_mults` find what they name.

  Attributes:
    backbone: called as `backbone(image, train=train)`; returns an array and a dict `out`, where
      `out['pre_logits']` is phi [B, D].
    classifier: takes the noise of training from the stream 'dropout', the only one of big_vision.
    loss_integrator: of `het_nll`; None where the loss is one of big_vision's.
  """

  backbone: nn.Module
  classifier: PredictiveLogits
  loss_integrator: Integrator | None = None

  def setup(self) -> None:
    nn.share_scope(self, self.backbone)
    nn.share_scope(self, self.classifier)

  def __call__(
    self, image: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array | TrainingLogits, dict[str, Any]]:
    """image [B, H, W, C] -> logits [B, K], float32 or wider, and all outputs of the backbone.

    `out['logits']` are the logits. In training they are `TrainingLogits` if there is a
    `loss_integrator`.

    Raises:
      ValueError: the backbone has no pre-logits [B, D].
    """
    _, out = self.backbone(image, train=train)
    if 'pre_logits' not in out:
      raise ValueError(
        f"config.model.base: {type(self.backbone).__module__} has no out['pre_logits'] [B, D], "
        'which a head needs: choose a model of images, such as vit, bit or mlp_mixer'
      )
    phi = out['pre_logits']
    if train and self.loss_integrator is not None:
      keys = row_keys(self.make_rng(self.classifier.rng_collection), phi.shape[0])
      logits = TrainingLogits(self.classifier.head(phi), keys, self.loss_integrator)
    else:
      logits = self.classifier(phi)
    return logits, out | {'logits': logits}


def Model(  # noqa: N802  big_vision calls it by this name
  num_classes: int | None = None,
  *,
  base: str,
  head: str,
  num_samples: int = 64,
  loss_samples: int | None = None,
  temperature: float | Mapping[str, Any] | None = None,
  **settings: Any,
) -> HeadModel:
  """The model of `config.model_name = 'het'` and `config.model`.

  Args:
    num_classes: K, `config.num_classes`.
    base: name of a module in big_vision/models, such as 'vit', 'bit' or 'mlp_mixer'.
    head: 'det', 'het', 'het_h' or 'het_xl'.
    num_samples: S of a softmax with noise; a sigmoid is exact.
    loss_samples: S of the loss `config.loss = 'het_nll'`, whose samples follow the label; None for
      the losses of big_vision. With the link 'softmax' only.
    temperature: a number is fixed; a mapping has settings of `LearnedTemperature`; None is the
      learned temperature of the paper, and 1 for 'det'.
    **settings: attributes of the head (`num_factors`, `link`, ...), and for all other names what
      the base takes (`variant`, ...).

  Raises:
    ValueError: K is missing, base or head are unknown, or a setting is unknown or wrong.
  """
  loss_integrator = None
  if loss_samples is not None:
    if settings.get('link', 'softmax') != 'softmax':
      raise ValueError(
        f"config.model.loss_samples={loss_samples} needs link='softmax': the loss of a sigmoid is "
        'exact, so leave loss_samples out'
      )
    loss_integrator = Integrator(num_samples=loss_samples)
  if not num_classes:
    raise ValueError(f'config.num_classes={num_classes} must be the number of classes')
  if head not in HEADS:
    raise ValueError(f'config.model.head={head!r} is unknown: choose one of {", ".join(HEADS)}')
  cls = HEADS[head]
  of_head = {name: settings.pop(name) for name in _settings(cls) if name in settings}
  classifier = PredictiveLogits(
    cls(num_classes, class_multiple=1, temperature=_temperature(head, temperature), **of_head),
    Integrator(num_samples=num_samples),
    rng_collection='dropout',
  )
  backbone = _backbone(base, head, settings)
  if loss_integrator is not None:
    # Where train.py and the evaluators look for the loss that a config names.
    importlib.import_module('big_vision.utils').het_nll = het_nll
  return HeadModel(backbone, classifier, loss_integrator)


def load(
  init_params: Mapping[str, Any] | None,
  init_file: str,
  model_cfg: Mapping[str, Any],
  dont_load: str | Iterable[str] = (),
) -> dict[str, Any]:
  """Parameters of a checkpoint of the base or of this model: `config.model_init`.

  The base's own `load` reads the file, once for the names and once for the values. Parameters of
  noise and temperature that it lacks keep their initial values.

  Args:
    init_params: initial parameters; None returns those of the file.
    init_file: a path or a name that the base knows.
    model_cfg: `config.model`.
    dont_load: a pattern or patterns of names that keep their initial values, as in
      `config.model_load`.

  Raises:
    ValueError: other names are missing or left over, or the shape of a parameter of the head is
      another one.
  """
  base = _base_module(model_cfg['base'])
  names = _flat(base.load(None, init_file, model_cfg))
  if init_params is None:
    return traverse_util.unflatten_dict(names, sep='/')
  initial = _flat(init_params)
  own = [f'head/{part}/' for part in ('covariance', 'temperature')] + ['head/noise_kernel']
  new = [name for name in initial if name.startswith(tuple(own)) and name not in names]
  kept = [dont_load] if isinstance(dont_load, str) else dont_load
  loaded = base.load(init_params, init_file, model_cfg, [*kept, *new])
  for name, x in _flat(loaded).items():
    if name.startswith('head/') and x.shape != initial[name].shape:
      raise ValueError(
        f'config.model_init={init_file!r}: {name} has the shape {x.shape}, the model '
        f'{initial[name].shape}; set config.model_load.dont_load=[{name!r}] to start it afresh'
      )
  return loaded


def _flat(params: Mapping[str, Any]) -> dict[str, Any]:
  return traverse_util.flatten_dict(params, sep='/')


def _settings(cls: type[nn.Module]) -> list[str]:
  """Attributes of a module that a config may set; `Model` has an argument for the temperature."""
  excluded = (*_NOT_SETTINGS, 'temperature')
  return [name for name in cls.__dataclass_fields__ if name not in excluded]


def _temperature(
  head: str, temperature: float | Mapping[str, Any] | None
) -> FixedTemperature | LearnedTemperature:
  if temperature is None:
    return FixedTemperature() if head == 'det' else LearnedTemperature()
  if isinstance(temperature, int | float):
    return FixedTemperature(temperature)
  names = _settings(LearnedTemperature)
  if isinstance(temperature, str) or not set(temperature) <= set(names):
    raise ValueError(
      f'config.model.temperature={temperature!r} must be a number, or a dict of some of '
      f'{", ".join(names)}'
    )
  return LearnedTemperature(**temperature)


def _backbone(base: str, head: str, settings: Mapping[str, Any]) -> nn.Module:
  """The base without its last layer."""
  module = _base_module(base)
  try:
    return module.Model(num_classes=None, **settings)
  except (KeyError, TypeError, ValueError) as error:  # big_vision's, for a variant KeyError('X')
    raise ValueError(
      f'config.model: big_vision.models.{base} refuses {dict(settings)} with {error!r}; besides '
      f'its own settings, head={head!r} takes temperature, num_samples, '
      f'{", ".join(_settings(HEADS[head]))}'
    ) from error


def _base_module(base: str) -> ModuleType:
  """The module big_vision.models.{base}; ValueError if there is none, or it has no `Model`."""
  models = importlib.import_module('big_vision.models')
  name = f'big_vision.models.{base}'
  try:
    module = importlib.import_module(name)
  except ModuleNotFoundError as error:
    if not name.startswith(f'{error.name}'):
      raise  # the base is there, and a package that it imports is not
    module = None
  if module is None or module is sys.modules[__name__] or not hasattr(module, 'Model'):
    known = [x.name for x in pkgutil.iter_modules(models.__path__) if not x.ispkg]
    raise ValueError(
      f'config.model.base={base!r} is unknown: choose a module of big_vision/models, such as '
      f'{", ".join(sorted(set(known) - {"common"}))}'
    )
  return module
