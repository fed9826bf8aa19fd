"""FLOPs of heads by the number of Monte Carlo samples S (figures 3 and 4), counted in the program.

Nothing is computed, so the paper's sizes can be used.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import gin
from het_plugin import integrate, reporting
from het_plugin.experiments import trainings
from het_plugin.training.flops import count_flops
from studies.study import Request, check_labels, check_settings

_CHANNELS = 3
_GIGA = 1e9


def linear_classifier(num_classes: int) -> nn.Module:
  """W and b of HET-XL as `get_logits`, which takes samples one by one: the paper's order."""
  return nn.Dense(num_classes)


@dataclasses.dataclass(frozen=True)
class HeadFlops:
  """FLOPs per image: training loss forward and backward, and evaluation forward."""

  train: float
  evaluation: float


def head_flops(
  head: Any, pre_logits_dim: int, train_integrator: Any, eval_integrator: Any
) -> HeadFlops:
  """FLOPs of a head and its integrator for one image, by `count_flops`."""
  phi = jax.ShapeDtypeStruct((1, pre_logits_dim), jnp.float32)
  labels = jnp.zeros((1, 1), jnp.int32)
  params = jax.eval_shape(lambda x: head.init(jax.random.key(0), x)['params'], phi)

  def nll(integrator, params, phi):
    keys = integrate.example_keys(jax.random.key(0), jnp.arange(1))
    return integrator.nll(head.apply({'params': params}, phi), labels, keys).sum()

  gradient = jax.grad(nll, argnums=(1, 2))
  train = jax.make_jaxpr(lambda *x: gradient(train_integrator, *x))(params, phi)
  evaluation = jax.make_jaxpr(lambda *x: nll(eval_integrator, *x))(params, phi)
  return HeadFlops(count_flops(train.jaxpr), count_flops(evaluation.jaxpr))


def backbone_flops(backbone: Any, image: Sequence[int]) -> HeadFlops:
  """FLOPs of a backbone for one image [1, H, W, C]."""
  x = jax.ShapeDtypeStruct(tuple(image), jnp.float32)
  params = jax.eval_shape(lambda x: backbone.init(jax.random.key(0), x)['params'], x)

  def total(params, x, train):
    rngs = {'dropout': jax.random.key(0)}
    return backbone.apply({'params': params}, x, train=train, rngs=rngs)[0].sum()

  train = jax.make_jaxpr(jax.grad(lambda p, x: total(p, x, True)))(params, x)
  evaluation = jax.make_jaxpr(lambda p, x: total(p, x, False))(params, x)
  return HeadFlops(count_flops(train.jaxpr), count_flops(evaluation.jaxpr))


@dataclasses.dataclass(frozen=True)
class Flops:
  """FLOPs per image of heads on one backbone, by the number of samples.

  Attributes:
    title: one line.
    paper: the figures that it mirrors, and what the paper found.
    shared, cells: settings of all cells, and {label: settings} (`Ablation`).
    samples: values of S, in training and evaluation.
  """

  title: str
  paper: str
  shared: Sequence[str]
  cells: Mapping[str, Sequence[str]]
  samples: Sequence[int] = (1, 4, 16, 64, 256, 512, 1000)

  def __post_init__(self):
    check_settings('Flops', self.shared, self.cells)

  def run(self, request: Request) -> Iterator[reporting.Report]:
    """Counts; trains nothing."""
    if request.seeds is not None:
      raise ValueError('--seeds has no effect on Flops, which trains nothing')
    check_labels('Flops.cells', request.cells or (), self.cells)
    rows = []
    backbone = None
    configs = {}
    chosen = {
      label: settings
      for label, settings in self.cells.items()
      if request.cells is None or label in request.cells
    }
    request.check_used(self.shared, chosen)
    for label, settings in chosen.items():
      request.run_of([*self.shared, *settings]).parse(request.output_dir)
      configs[label] = gin.config_str()
      encoder = trainings.called('BACKBONE')
      head = trainings.called('HEAD')
      if backbone is None:
        size = gin.query_parameter('%TASK_FEATURE_LENGTHS')['image']
        backbone = backbone_flops(encoder, (1, size, size, _CHANNELS))
      d = encoder.pre_logits_dim
      costs = {
        s: head_flops(head, d, *(_integrator(scope, s) for scope in ('train', 'eval')))
        for s in self.samples
      }
      rows.append(
        {
          'head': label,
          'num_classes': head.num_classes,
          'pre_logits_dim': d,
          'tables': {
            'GFLOP per image, training': {
              f'S = {s}': (backbone.train + cost.train) / _GIGA for s, cost in costs.items()
            },
            'GFLOP per image, evaluation': {
              f'S = {s}': (backbone.evaluation + cost.evaluation) / _GIGA
              for s, cost in costs.items()
            },
          },
        }
      )
    yield reporting.Report(
      title=self.title,
      introduction=f'{self.paper} Here: floating point operations of matrix products and '
      'convolutions, 2 per multiply and add, of forward and backward pass.',
      row_title='cell',
      rows=[{'name': row['head']} | {k: v for k, v in row.items() if k != 'head'} for row in rows],
      notes=[
        f'The backbone alone: {backbone.train / _GIGA:.4g} GFLOP per image in training, '
        f'{backbone.evaluation / _GIGA:.4g} in evaluation.'
      ],
      draw=lambda: {
        name: self._figure(rows, group)
        for name, group in zip(('training', 'evaluation'), rows[0]['tables'], strict=True)
      },
      configs=configs,
      json={
        'title': self.title,
        'paper': self.paper,
        'backbone': dataclasses.asdict(backbone),
        'rows': rows,
      },
    )

  def _figure(self, rows: Sequence[Mapping[str, Any]], group: str) -> reporting.Figure:
    lines = {row['head']: (self.samples, list(row['tables'][group].values())) for row in rows}
    png = reporting.lines_png(lines, xlabel='samples S', ylabel=group, log_x=True, log_y=True)
    return reporting.Figure(png, group, f'{group} of every cell by the number of samples.')


def _integrator(scope: str, num_samples: int) -> integrate.Integrator:
  with gin.config_scope(scope):
    return gin.get_configurable(integrate.Integrator)(num_samples=num_samples)
