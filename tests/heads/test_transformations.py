"""Heads and their losses under the transformations and meshes with which hosts use them.

Every case is one transformation of the loss and its gradient, for a head, a link and a kind of
keys, beside the same without it. Below are derivatives, optimizers and lifts of nnx.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import unfreeze
from flax.linen import partitioning
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import het_plugin.nnx
from het_plugin.heads import (
  ContrastiveDet,
  ContrastiveHetXL,
  Det,
  Het,
  HetH,
  HetXL,
  LearnedTemperature,
  contrastive_nll,
)
from het_plugin.integrate import Integrator, example_keys, top_class
from tests.meshes import make_mesh, on_mesh

B = 8
D = 6
K = 13
HEADS = {'det': Det, 'het': Het, 'het_h': HetH, 'het_xl': HetXL}
PHI = jax.random.normal(jax.random.key(0), (B, D))
LABELS = jnp.arange(B)


@dataclasses.dataclass(frozen=True)
class Problem:
  """A loss, with the arrays that it takes."""

  name: str = 'het_xl'
  link: str = 'softmax'
  num_samples: int = 2
  key_kind: str = 'threefry2x32'
  tilt: bool = True

  @property
  def settings(self):
    factors = {} if self.name == 'det' else {'num_factors': 3}
    return {'link': self.link, 'class_multiple': 16, 'temperature': LearnedTemperature(), **factors}

  @property
  def head(self):
    return HEADS[self.name](K, **self.settings)

  @property
  def integrator(self):
    return Integrator(num_samples=self.num_samples, tilt=self.tilt)

  @functools.cached_property
  def params(self):
    return jax.jit(self.head.init)(jax.random.key(1), PHI)['params']

  @functools.cached_property
  def batch(self):
    with jax.ensure_compile_time_eval():  # also where it is first read inside a transformation
      if self.key_kind == 'threefry2x32':
        keys = example_keys(jax.random.key(2), jnp.arange(B))
      else:
        keys = jax.random.split(jax.random.key(2, impl=self.key_kind), B)
    return PHI, LABELS, keys

  def nll(self, params, phi, labels, keys):
    return self.integrator.nll(self.head.apply({'params': params}, phi), labels, keys)

  def loss(self, params, phi, labels, keys):
    return self.nll(params, phi, labels, keys).mean()

  @property
  def step(self):
    return jax.value_and_grad(self.loss)

  @functools.cached_property
  def expected(self):
    return jax.jit(self.step)(self.params, *self.batch)


def placed(problem, mesh, of_params=lambda x: P()):
  """The arrays on a mesh."""
  params = jax.tree.map(lambda x: NamedSharding(mesh, of_params(x)), problem.params)
  of_batch = NamedSharding(mesh, P('data'))
  return jax.device_put((problem.params, *problem.batch), (params, *(of_batch,) * 3))


def fsdp(problem):
  """W cut over the devices of the batch, by the compiler."""
  mesh = make_mesh(2, names=('data',))
  by_features = lambda x: P('data') if x.ndim > 1 and x.shape[0] == D else P()  # noqa: E731
  with jax.set_mesh(mesh):
    return jax.jit(problem.step)(*placed(problem, mesh, by_features))


def rules_with_one_axis(problem):
  """Rules that put batch and classes on one axis: flax gives it to the first rule."""
  results = []
  for first, second in (('batch', 'vocab'), ('vocab', 'batch')):
    with on_mesh(make_mesh(2, names=('data',)), ((first, 'data'), (second, 'data'))):
      results.append(jax.jit(problem.step)(problem.params, *problem.batch))
  jax.tree.map(assert_close, *results)
  return results[0]


def three_axes(problem):
  rules = (('batch', ('data', 'fsdp')), ('vocab', 'model'), ('embed', 'fsdp'))
  with on_mesh(make_mesh(2, 2, 2, names=('data', 'fsdp', 'model')), rules):
    return jax.jit(problem.step)(problem.params, *problem.batch)


def of_part(problem):
  def run(*args):
    loss, gradient = problem.step(*args)
    # JAX sums the gradient of parameters that all devices share.
    return jax.lax.pmean(loss, 'data'), jax.tree.map(lambda x: x / 2, gradient)

  return run


def in_shard_map(problem, kind, manual, rules=()):
  mesh = make_mesh(2, 2, kind=kind)
  function = jax.shard_map(
    of_part(problem),
    in_specs=(P(), *(P('data'),) * 3),
    out_specs=P(),
    axis_names={*manual},
  )
  with on_mesh(mesh, rules):
    return jax.jit(function)(*placed(problem, mesh))


def on_an_explicit_mesh(problem):
  mesh = make_mesh(2, 2, kind=AxisType.Explicit)
  with jax.set_mesh(mesh):
    return jax.jit(problem.step)(*placed(problem, mesh))


def ensemble(problem):
  """Members by `jax.vmap`; one has other parameters."""
  other = jax.tree.map(lambda x: 1.1 * x, problem.params)
  members = jax.tree.map(lambda *x: jnp.stack(x), problem.params, other)
  step = jax.jit(jax.vmap(problem.step, (0, None, None, None)))
  return jax.tree.map(lambda x: x[0], step(members, *problem.batch))


def microbatches(problem):
  def run(params, *batch):
    parts = jax.tree.map(lambda x: x.reshape(2, B // 2, *x.shape[1:]), batch)
    _, steps = jax.lax.scan(lambda _, part: (None, problem.step(params, *part)), None, parts)
    return jax.tree.map(lambda x: x.mean(axis=0), steps)

  return jax.jit(run)(problem.params, *problem.batch)


def remat(problem, policy):
  policies = jax.checkpoint_policies
  policy = {
    'everything_saveable': policies.everything_saveable,
    'nothing_saveable': policies.nothing_saveable,
    'dots_saveable': policies.dots_saveable,
    'dots_with_no_batch_dims_saveable': policies.dots_with_no_batch_dims_saveable,
    'save_anything_except': policies.save_anything_except_these_names('logits'),
  }[policy]
  step = jax.value_and_grad(jax.checkpoint(problem.loss, policy=policy))
  return jax.jit(step)(problem.params, *problem.batch)


def strict_promotion(problem):
  with jax.numpy_dtype_promotion('strict'):
    return jax.jit(problem.step)(problem.params, *problem.batch)


def each_example_alone(problem):
  """No example's noise depends on its batch."""
  step = jax.jit(problem.step)
  steps = [step(problem.params, *(x[i : i + 1] for x in problem.batch)) for i in range(B)]
  return jax.tree.map(lambda *x: jnp.stack(x).mean(axis=0), *steps)


def exported(problem):
  platforms = ('cpu', 'cuda', 'rocm', 'tpu')

  # Keys are no type of exported programs.
  def step(params, phi, labels, data):
    return problem.step(params, phi, labels, jax.random.wrap_key_data(data))

  phi, labels, keys = problem.batch
  args = problem.params, phi, labels, jax.random.key_data(keys)
  return export.export(jax.jit(step), platforms=platforms)(*args).call(*args)


AUTO = AxisType.Auto
EXPLICIT = AxisType.Explicit
TRANSFORMATIONS = {
  'fsdp': fsdp,
  'rules_with_one_axis': rules_with_one_axis,
  'three_axes': three_axes,
  'explicit_mesh': on_an_explicit_mesh,
  'shard_map': functools.partial(in_shard_map, kind=AUTO, manual=('data', 'model')),
  'shard_map_of_data': functools.partial(in_shard_map, kind=AUTO, manual=('data',)),
  'shard_map_of_data_and_rules': functools.partial(
    in_shard_map, kind=AUTO, manual=('data',), rules=(('vocab', 'model'),)
  ),
  'explicit_shard_map_of_data': functools.partial(in_shard_map, kind=EXPLICIT, manual=('data',)),
  'explicit_shard_map': functools.partial(in_shard_map, kind=EXPLICIT, manual=('data', 'model')),
  'ensemble': ensemble,
  'microbatches': microbatches,
  **{
    policy: functools.partial(remat, policy=policy)
    for policy in (
      'everything_saveable',
      'nothing_saveable',
      'dots_saveable',
      'dots_with_no_batch_dims_saveable',
      'save_anything_except',
    )
  },
  'strict_promotion': strict_promotion,
  'each_example_alone': each_example_alone,
  'export': exported,
}
PROBLEMS = [
  Problem('het_xl'),
  Problem('het_h'),
  Problem('het'),
  Problem('het_xl', 'sigmoid'),
  Problem('det'),
  Problem('het_h', 'sigmoid'),
]
WITH_FIT = Problem(num_samples=4)
QUICK = [('explicit_shard_map_of_data', PROBLEMS[0]), ('strict_promotion', PROBLEMS[4])]


def cases():
  """Two problems for each transformation, so that every problem has its turn."""
  found = list(QUICK)
  for i, name in enumerate(TRANSFORMATIONS):
    found += [(name, PROBLEMS[(2 * i + j) % len(PROBLEMS)]) for j in range(2)]
  found += [('explicit_mesh', WITH_FIT), ('shard_map_of_data_and_rules', WITH_FIT)]
  for kind in ('rbg', 'unsafe_rbg'):
    found.append(('each_example_alone', dataclasses.replace(WITH_FIT, key_kind=kind)))
  for case in dict.fromkeys(found):
    name, problem = case
    fields = (name, *map(str, dataclasses.astuple(problem)))
    yield pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id='-'.join(fields))


def assert_close(got, expected):
  np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize('name,problem', [*cases()])
def test_loss_and_gradient_are_those_without(name, problem):
  jax.tree.map(assert_close, TRANSFORMATIONS[name](problem), problem.expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  'problem',
  # Points that follow the label move with the parameters, and no gradient flows through that.
  [Problem('het_xl', tilt=False), Problem('het_h', tilt=False), Problem('het', 'sigmoid')],
)
def test_products_with_the_hessian(problem):
  """Forward over reverse mode and reverse over reverse mode agree, and with differences."""
  direction = jax.tree.map(jnp.cos, problem.params)
  gradient = jax.grad(problem.loss)

  @jax.jit
  def found(params, *batch):
    def at(step):
      moved = jax.tree.map(lambda x, d: x + step * d, params, direction)
      return gradient(moved, *batch)

    def slope(params):
      products = jax.tree.map(lambda g, d: (g * d).sum(), gradient(params, *batch), direction)
      return sum(jax.tree.leaves(products))

    forward = jax.jvp(at, (0.0,), (1.0,))[1]
    difference = jax.tree.map(lambda a, b: (a - b) / 0.02, at(0.01), at(-0.01))
    return forward, jax.grad(slope)(params), difference

  forward, reverse, difference = found(problem.params, *problem.batch)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), forward, reverse
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=5e-3), forward, difference
  )


@pytest.mark.slow
@pytest.mark.parametrize('problem', [Problem('het_xl'), Problem('det', 'sigmoid')])
def test_jacobians_in_both_modes(problem):
  params = problem.params

  def log_prob(phi):
    logits = problem.head.apply({'params': params}, phi)
    return problem.integrator.log_prob(logits, problem.batch[2])[:, :K]

  forward = jax.jit(jax.jacfwd(log_prob))(PHI)
  np.testing.assert_allclose(forward, jax.jit(jax.jacrev(log_prob))(PHI), rtol=1e-3, atol=1e-5)


OPTIMIZERS = {
  'lbfgs': lambda: optax.lbfgs(),
  'muon': lambda: optax.contrib.muon(0.1),
  'schedule_free': lambda: optax.contrib.schedule_free_adamw(0.1),
  'sam': lambda: optax.contrib.sam(
    optax.adam(0.1),
    optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
    opaque_mode=True,
    reset_state=False,
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_optimizers_lower_the_loss(name):
  problem = PROBLEMS[0]
  optimizer = OPTIMIZERS[name]()
  value_and_grad = jax.value_and_grad(lambda params: problem.loss(params, *problem.batch))
  more = {
    'lbfgs': lambda params, value, grad: {
      'value': value,
      'grad': grad,
      'value_fn': lambda params: value_and_grad(params)[0],
    },
    'sam': lambda *_: {'grad_fn': lambda params, _: value_and_grad(params)[1]},
  }.get(name, lambda *_: {})

  @jax.jit
  def run(params):
    def step(carry, _):
      params, state = carry
      value, grad = value_and_grad(params)
      updates, state = optimizer.update(grad, state, params, **more(params, value, grad))
      return (optax.apply_updates(params, updates), state), value

    return jax.lax.scan(step, (params, optimizer.init(params)), None, 8)[1]

  losses = run(problem.params)
  assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_lifts_of_nnx():
  """An ensemble by `nnx.vmap`, `nnx.remat`, and microbatches by `nnx.scan`."""
  problem = PROBLEMS[0]
  factors = {'num_factors': 3, 'class_multiple': 16}

  @nnx.split_rngs(splits=2)
  @nnx.vmap(axis_size=2)
  def make(rngs):
    return het_plugin.nnx.HetXL(D, K, rngs=rngs, **factors)

  def nll(head, phi, labels, keys):
    return problem.integrator.nll(head(phi), labels, keys)

  members = make(nnx.Rngs(0))
  found = nnx.jit(nnx.vmap(nll, in_axes=(0, None, None, None)))(members, *problem.batch)
  definition, state = nnx.split(members)
  one = nnx.merge(definition, jax.tree.map(lambda x: x[1], state))
  expected = nnx.jit(nll)(one, *problem.batch)
  assert_close(found[1], expected)
  assert np.abs(found[0] - found[1]).max() > 0.01

  assert_close(nnx.jit(nnx.remat(nll))(one, *problem.batch), expected)
  parts = jax.tree.map(lambda x: x.reshape(2, B // 2, *x.shape[1:]), problem.batch)
  scanned = nnx.jit(nnx.scan(nll, in_axes=(None, 0, 0, 0), out_axes=0))(one, *parts)
  assert_close(scanned.reshape(B), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  'problem, settings',
  [
    (Problem('het_h'), {'num_samples': 3}),
    (Problem('het_h'), {'num_samples': 2, 'max_bytes': 5000}),
    (Problem('het_xl'), {'num_samples': 3, 'max_bytes': 5000}),
  ],
)
def test_no_step_makes_an_infinity(problem, settings):
  """`jax_debug_infs` looks at every operation outside `jax.jit`."""
  head = problem.head.clone(num_classes=150)
  logits, _ = jax.jit(head.init_with_output)(jax.random.key(1), PHI)
  integrator = Integrator(**settings)
  with jax.debug_infs(True):
    integrator.nll(logits, LABELS, problem.batch[2])
    integrator.log_prob(logits, problem.batch[2])
    top_class(logits)


@pytest.mark.parametrize('make', [ContrastiveDet, lambda: ContrastiveHetXL(num_factors=2)])
def test_contrastive_losses_with_strict_promotion(make):
  head = make()
  params = jax.eval_shape(head.init, jax.random.key(1), PHI, PHI)

  def loss(params, keys):
    directions = contrastive_nll(head.apply(params, PHI, PHI), Integrator(2), keys, jnp.ones(B))
    return sum(direction.nll.sum() for direction in directions)

  with jax.numpy_dtype_promotion('strict'):
    gradient = jax.eval_shape(jax.grad(loss), params, PROBLEMS[0].batch[2])
  assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, params)


def test_logical_axes_are_in_a_collection():
  """docs/own_trainer.md names the function that reads them."""
  variables = jax.eval_shape(PROBLEMS[0].head.init, jax.random.key(1), PHI)
  names = partitioning.get_axis_names(variables['params_axes'])
  assert names['kernel'] == P('embed', 'vocab')
  assert jax.tree.map(len, unfreeze(names)) == jax.tree.map(jnp.ndim, variables['params'])
