"""FLOPs of heads by the number of Monte Carlo samples (figures 3 and 4), counted in what would run,
and the operations that table 11 derives. Nothing is computed, so the paper's own sizes are studied.

K classes, D pre-logits, R factors, S samples.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import gin
from het_plugin import heads, integrate, reporting
from het_plugin.experiments import runs as runs_lib
from het_plugin.experiments.outcome import Outcome, Request
from het_plugin.experiments.settings import bindings_of, check_settings, files_of
from het_plugin.training.flops import count_flops

_CHANNELS = 3
_GIGA = 1e9
_MEGA = 1e6


def het_operations(k: int, d: int, r: int, s: int) -> int:
  """Multiply-adds and products of HET's head for one example (table 11, no term left out)."""
  return d * k + (k * s + k * r * s) + (d * k + k * s) + (d * k + k * s)


def het_xl_operations(k: int, d: int, r: int, s: int) -> int:
  """The same of HET-XL's, which samples and then projects."""
  return d * d + (d * s + d * r * s) + (d * d + d * s) + (d * s + d * k * s)


def crossing(k: int, d: int, r: int) -> float | None:
  """The S below which HET-XL takes fewer operations than HET by table 11; None where it does for
  every S.

  Both grow linearly in S: HET from 3 D K, HET-XL from 2 D^2.
  """
  growth = (het_xl_operations(k, d, r, 1) - het_xl_operations(k, d, r, 0)) - (
    het_operations(k, d, r, 1) - het_operations(k, d, r, 0)
  )
  head_start = het_operations(k, d, r, 0) - het_xl_operations(k, d, r, 0)
  return head_start / growth if growth > 0 else None


@dataclasses.dataclass(frozen=True)
class HeadFlops:
  """Of one image: forward and backward of the training loss, and the evaluation's forward."""

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
  """Heads on one backbone, and what an image costs with each number of samples.

  Attributes:
    title: one line.
    paper: the figures that it mirrors, and what the paper found.
    shared: settings of all cells (`Ablation`).
    cells: {label: settings}.
    samples: values of S, in training and evaluation.

  Raises:
    ValueError: an attribute that has the wrong form.
  """

  title: str
  paper: str
  shared: Sequence[str]
  cells: Mapping[str, Sequence[str]]
  samples: Sequence[int] = (1, 4, 16, 64, 256, 512, 1000)

  def __post_init__(self):
    check_settings('Flops', self.shared, self.cells)

  def _parsed(self, request: Request) -> Iterator[str]:
    """The labels, with the gin configuration of each parsed."""
    for label, settings in self.cells.items():
      if request.cells is None or label in request.cells:
        settings = [*self.shared, *settings]
        bindings = [*bindings_of(settings), *request.gin_bindings]
        run = runs_lib.Run(files_of(settings), bindings, request.gin_search_paths)
        run.parse(request.output_dir)
        yield label

  def run(self, request: Request) -> Iterator[Outcome]:
    """Counts; trains nothing, so seeds do not matter."""
    check_settings('Flops', self.shared, self.cells, request.cells)
    rows, operations, backbone, configs = [], {}, None, {}
    for label in self._parsed(request):
      configs[label] = gin.config_str()
      encoder, head = runs_lib.called('BACKBONE'), runs_lib.called('HEAD')
      if backbone is None:
        size = gin.query_parameter('%TASK_FEATURE_LENGTHS')['image']
        backbone = backbone_flops(encoder, (1, size, size, _CHANNELS))
      d = encoder.pre_logits_dim
      costs = {
        s: head_flops(head, d, *(_integrator(scope, s) for scope in ('train', 'eval')))
        for s in self.samples
      }
      if (found := _operations(head, d, self.samples)) is not None:
        operations[type(head)] = found
      rows.append(
        {
          'head': label,
          'num_classes': head.num_classes,
          'pre_logits_dim': d,
          'tables': {
            'GFLOP an image, training': {
              f'S = {s}': (backbone.train + cost.train) / _GIGA for s, cost in costs.items()
            },
            'GFLOP an image, evaluation': {
              f'S = {s}': (backbone.evaluation + cost.evaluation) / _GIGA
              for s, cost in costs.items()
            },
          },
        }
      )
    yield Outcome(
      title=self.title,
      introduction=f'{self.paper} Here: floating point operations of matrix products and '
      'convolutions, 2 a multiply and add, of forward and backward pass.',
      rows=rows,
      tables=_operation_tables(operations, self.samples),
      notes=[
        f'The backbone alone: {backbone.train / _GIGA:.4g} GFLOP an image in training, '
        f'{backbone.evaluation / _GIGA:.4g} in evaluation.'
      ],
      figures=[self._figure(rows, group) for group in rows[0]['tables']],
      configs=configs,
      details={'paper': self.paper, 'backbone': dataclasses.asdict(backbone)},
    )

  def _figure(self, rows: Sequence[Mapping[str, Any]], group: str) -> reporting.Figure:
    lines = {row['head']: (self.samples, list(row['tables'][group].values())) for row in rows}
    png = reporting.lines_png(lines, xlabel='samples S', ylabel=group, log_x=True, log_y=True)
    return reporting.Figure(png, group, f'{group} of every cell by the number of samples.')


def _integrator(scope: str, num_samples: int) -> integrate.Integrator:
  with gin.config_scope(scope):
    return gin.get_configurable(integrate.Integrator)(num_samples=num_samples)


def _operations(head: Any, d: int, samples: Sequence[int]) -> dict[str, Any] | None:
  formulas = {heads.Het: het_operations, heads.HetXL: het_xl_operations}
  if type(head) not in formulas:
    return None
  k, r = head.num_classes, head.num_factors
  operations = [formulas[type(head)](k, d, r, s) for s in samples]
  return {'size': (k, d, r), 'operations': operations}


def _operation_tables(
  operations: Mapping[type, Mapping[str, Any]], samples: Sequence[int]
) -> list[reporting.Table]:
  lines = [
    [cls.__name__, *(f'{n / _MEGA:,.1f}' for n in found['operations'])]
    for cls, found in operations.items()
  ]
  header = ['head', *(f'S = {s}' for s in samples)]
  caption = "Millions of operations of the head's forward pass by table 11"
  if operations.keys() >= {heads.Het, heads.HetXL}:
    s = crossing(*operations[heads.Het]['size'])
    until = 'for every S' if s is None else f'for S below {s:.2f}'
    caption += f'; HET-XL takes fewer than HET {until}'
  return [reporting.Table(caption, header, lines)] if lines else []
