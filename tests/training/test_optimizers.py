import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from het_plugin.training import late_noise, learning_rates, optimizers

PARAMS = {
  'block': {'kernel': np.float32([[2.0, -1.0]]), 'bias': np.float32([0.5])},
  'norm': {'scale': np.float32([1.0])},
  'head': {'kernel': np.float32([[3.0]]), 'temperature': np.array(0.3, np.float32)},
}


def update(optimizer: optimizers.OptaxWrapper, grads, params=PARAMS):
  tx = optimizer.optax_optimizer
  return jax.jit(lambda grads: tx.update(grads, tx.init(params), params)[0])(grads)


def test_decay_is_lr_times_wd_times_param_and_on_kernels_only():
  zero = jax.tree.map(np.zeros_like, PARAMS)
  updates = update(optimizers.adamw(0.1, weight_decay=0.2), zero)
  np.testing.assert_allclose(updates['block']['kernel'], -0.1 * 0.2 * PARAMS['block']['kernel'])
  np.testing.assert_allclose(updates['head']['kernel'], -0.1 * 0.2 * PARAMS['head']['kernel'])
  for leaf in (updates['block']['bias'], updates['norm']['scale'], updates['head']['temperature']):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_gradients_are_clipped_to_the_global_norm_before_adam():
  grads = jax.tree.map(lambda p: 100 * np.ones_like(p), PARAMS)
  norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(grads)))
  clipped = jax.tree.map(lambda g: g / norm, grads)
  # eps of the size of the gradients, or Adam would hide their scale.
  got = update(optimizers.adamw(0.1, eps=1.0, clip_norm=1.0), grads)
  want = update(optimizers.adamw(0.1, eps=1.0), clipped)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_frozen_parameters_keep_their_values_and_cost_no_moments():
  frozen = optimizers.adamw(0.1, weight_decay=0.2, clip_norm=1.0, frozen_params='^block/')
  grads = jax.tree.map(np.ones_like, PARAMS)
  got = update(frozen, grads)
  jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.zeros_like(x)), got['block'])
  # The others are updated as if the frozen ones were not there, in the norm too.
  rest = {name: PARAMS[name] for name in ('norm', 'head')}
  others = optimizers.adamw(0.1, weight_decay=0.2, clip_norm=1.0)
  want = update(others, jax.tree.map(jnp.ones_like, rest), rest)
  for name in rest:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), got[name], want[name])
  state = frozen.optax_optimizer.init(PARAMS)
  moments = [path for path, x in jax.tree_util.tree_leaves_with_path(state) if jnp.size(x) > 0]
  assert not any('block' in jax.tree_util.keystr(path) for path in moments)
  assert int(optimizers.num_updates(state, default=jnp.int32(7))) == 0
  # Where no kernel is trained, nothing decays.
  got = update(optimizers.adamw(0.1, weight_decay=0.2, frozen_params='kernel$'), grads)
  np.testing.assert_allclose(got['block']['bias'], [-0.1], rtol=1e-5)
  np.testing.assert_array_equal(got['head']['kernel'], [[0.0]])
  wrong = optimizers.adamw(0.1, weight_decay=0.2, weight_decay_params='kernl', frozen_params='bias')
  with pytest.raises(ValueError, match="weight_decay_params='kernl' matches no"):
    wrong.optax_optimizer.init(PARAMS)


def test_the_first_factor_that_matches_multiplies_the_learning_rate():
  grads = jax.tree.map(np.ones_like, PARAMS)
  factors = (('^head/', learning_rates.unfreeze_at(1)), ('kernel$', 0.1))
  tx = optimizers.adamw(0.1, weight_decay=0.2, learning_rate_factors=factors).optax_optimizer
  plain = optimizers.adamw(0.1, weight_decay=0.2).optax_optimizer
  update = jax.jit(tx.update)
  plain_update = jax.jit(plain.update)
  state = tx.init(PARAMS)
  plain_state = plain.init(PARAMS)
  for head in (0.0, 1.0):  # unfrozen at the second update
    got, state = update(grads, state, PARAMS)
    want, plain_state = plain_update(grads, plain_state, PARAMS)
    np.testing.assert_allclose(got['head']['kernel'], head * want['head']['kernel'])
    np.testing.assert_allclose(got['block']['kernel'], 0.1 * want['block']['kernel'], rtol=1e-6)
    np.testing.assert_array_equal(got['norm']['scale'], want['norm']['scale'])
  with pytest.raises(ValueError, match="learning_rate_factors='haed' "):
    optimizers.adamw(0.1, learning_rate_factors=(('haed', 2.0),)).optax_optimizer.init(PARAMS)


@pytest.mark.parametrize('factored', [None, 'kernel$'])
def test_late_noise_starts_as_at_the_start_of_a_run(factored):
  settings = {'weight_decay': 0.2, 'clip_norm': 1.0, 'factored_params': factored}
  noise = late_noise.LateNoise(2, total_steps=4, params='^head/')
  late = optimizers.adamw(0.1, late_noise=noise, **settings).optax_optimizer
  grads = jax.tree.map(np.ones_like, PARAMS)
  rest = {name: x for name, x in PARAMS.items() if name != 'head'}
  others = optimizers.adamw(0.1, **settings).optax_optimizer
  late_update = jax.jit(late.update)
  others_update = jax.jit(others.update)
  state = late.init(PARAMS)
  others_state = others.init(rest)
  for n in range(2):
    assert int(optimizers.num_updates(state, default=jnp.int32(7))) == n
    got, state = late_update(grads, state, PARAMS)
    want, others_state = others_update({k: grads[k] for k in rest}, others_state, rest)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.zeros_like(x)), got['head'])
    for name in rest:
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), got[name], want[name])
  got, _ = late_update(grads, state, PARAMS)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, 1e-6),
    got['head'],
    update(optimizers.adamw(0.1, **settings), grads)['head'],
  )


def test_layers_count_back_from_the_head():
  shapes = {
    'backbone/embedding/kernel': (4, 4),
    'backbone/blocks/mlp/kernel': (2, 4, 4),  # stacked
    'backbone/encoder_norm/scale': (4,),
    'head/kernel': (4, 8),
    'text_tower/embedding': (8, 4),
    'text_tower/block00/mlp/kernel': (4, 4),
    'resnet/conv_root/kernel': (3, 3, 3, 4),
    'resnet/stage1_unit01/conv1/kernel': (1, 1, 4, 4),
    'resnet/stage1_units/conv1/kernel': (2, 1, 1, 4, 4),
    'resnet/stage2_unit01/conv1/kernel': (1, 1, 4, 4),
    'resnet/norm/scale': (4,),
    'vmoe/blocks/mlp/kernel': (2, 4, 4),  # before the first experts
    'vmoe/block02/moe/router': (4, 2),
    'convnext/stem_norm/scale': (4,),
    'convnext/stage1_block01/wi/kernel': (4, 4),
    'convnext/stage2_patches/kernel': (2, 2, 4, 8),
    'convnext/stage2_block01/wi/kernel': (8, 8),
    'convnext/stage2_block02/wi/kernel': (8, 8),
    'convnext/norm/scale': (8,),
  }
  found = learning_rates.layer_exponents(shapes)
  assert [x.ravel().tolist() for x in found.values()] == [
    [3],
    [2, 1],
    [0],
    [0],
    [2],
    [1],
    [5],
    [4],
    [3, 2],
    [1],
    [0],
    [3, 2],
    [1],
    [4],
    [3],
    [2],
    [2],
    [1],
    [0],
  ]
  assert found['backbone/blocks/mlp/kernel'].shape == (2, 1, 1)
  params = traverse_util.unflatten_dict({k: jnp.ones(v) for k, v in shapes.items()}, sep='/')
  decayed = optimizers.adamw(0.1, layer_decay=0.5, frozen_params='^text')
  updates = update(decayed, params, params)
  np.testing.assert_allclose(
    updates['backbone']['blocks']['mlp']['kernel'][:, 0, 0], [-0.025, -0.05], 1e-5
  )
  with pytest.raises(ValueError, match='layer_decay=0.5 .*layers'):
    optimizers.adamw(0.1, layer_decay=0.5).optax_optimizer.init(PARAMS['norm'])


def test_factored_moments_against_float64():
  """Adafactor (algorithm 4, without momentum) on one matrix, Adam on the rest; decay and learning
  rate are common.
  """
  rng = np.random.default_rng(0)
  params = {'head': {'kernel': jnp.asarray(rng.normal(size=(3, 5)), 'f4'), 'bias': jnp.ones(5)}}
  settings = {'weight_decay': 0.2, 'weight_decay_params': 'kernel$'}
  tx = optimizers.adamw(0.1, factored_params='^head/kernel$', **settings).optax_optimizer
  plain = optimizers.adamw(0.1, **settings).optax_optimizer
  update = jax.jit(tx.update)
  plain_update = jax.jit(plain.update)
  state = tx.init(params)
  plain_state = plain.init(params)
  rows = np.zeros(3)
  columns = np.zeros(5)
  for n in range(1, 5):
    grads = {'kernel': 3.0**n * rng.normal(size=(3, 5)), 'bias': rng.normal(size=5)}
    grads = {'head': {name: jnp.asarray(x, jnp.float32) for name, x in grads.items()}}
    updates, state = update(grads, state, params)
    plain_updates, plain_state = plain_update(grads, plain_state, params)
    g, w = (np.float64(x['head']['kernel']) for x in (grads, params))
    beta = 1 - n**-0.8
    rows = beta * rows + (1 - beta) * np.square(g).mean(axis=1)
    columns = beta * columns + (1 - beta) * np.square(g).mean(axis=0)
    step = g / np.sqrt(np.outer(rows, columns) / rows.mean())
    size = np.sqrt(np.square(step).mean())
    assert n == 1 or size > 1  # the clipping is tested
    want = -0.1 * (step / max(1, size) + 0.2 * w)
    np.testing.assert_allclose(updates['head']['kernel'], want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(updates['head']['bias'], plain_updates['head']['bias'], 1e-6)
  sizes = [x.size for x in jax.tree.leaves(state) if x.shape]
  assert sorted(sizes) == [1, 3, 5, 5, 5]  # rows, columns; two moments of the bias
  with pytest.raises(ValueError, match="factored_params='.haed/' matches no"):
    optimizers.adamw(0.1, factored_params='^haed/').optax_optimizer.init(params)


def test_the_average_of_the_parameters_against_float64():
  tx = optimizers.with_ema(optimizers.adamw(0.1), decay=0.6).optax_optimizer
  params = PARAMS
  state = tx.init(PARAMS)
  update = jax.jit(tx.update)
  want = None
  for n in range(20):
    grads = jax.tree.map(lambda p: np.sin(p + n), params)  # noqa: B023
    updates, state = update(grads, state, params)
    params = jax.tree.map(np.add, params, jax.device_get(updates))
    kernel = np.float64(params['head']['kernel'])
    d = min(0.6, n / (n + 9))
    want = kernel if n == 0 else d * want + (1 - d) * kernel
  np.testing.assert_allclose(optimizers.ema_params(state)['head']['kernel'], want, rtol=1e-6)
  assert (want != kernel).all()


@pytest.mark.parametrize(
  'decay, middle, end',
  [
    ('linear', 0.505, 0.01),
    ('cosine', 0.505, 0.01),
    ('constant', 1.0, 1.0),
    ('rsqrt', np.sqrt(10 / 60), np.sqrt(10 / 110)),
  ],
)
def test_schedules(decay, middle, end):
  schedule = optimizers.warmup_schedule(
    1.0, total_steps=110, warmup_steps=10, decay=decay, init_value=0.1, end_value=0.01
  )
  at = [0, 5, 10, 60, 110, 200]
  np.testing.assert_allclose([schedule(s) for s in at], [0.1, 0.55, 1.0, middle, end, end], 1e-5)


def test_a_warm_up_of_the_whole_run_is_refused():
  with pytest.raises(ValueError, match='warmup_steps=10.*total_steps=10'):
    optimizers.warmup_schedule(1.0, 10, 10)


def test_a_warm_up_below_1_is_a_share_of_the_steps():
  schedule = optimizers.warmup_schedule(1.0, 200, 0.05, decay='constant')
  np.testing.assert_allclose([schedule(s) for s in (5, 10, 20)], [0.5, 1.0, 1.0])
  short = optimizers.warmup_schedule(1.0, 4, 0.9, decay='cosine')  # not all of the four steps
  np.testing.assert_allclose([short(s) for s in (0, 3, 4)], [0.0, 1.0, 0.0])


def test_a_learning_rate_below_its_ends_is_refused_where_it_is_used():
  low = 5e-6
  ends = {'init_value': 1e-5, 'end_value': 1e-5}  # those of gin/runs/train.gin
  for warmup, decay, name in ((0, 'linear', 'end'), (0, 'rsqrt', 'end'), (5, 'constant', 'init')):
    schedule = optimizers.warmup_schedule(low, 10, warmup, decay, **ends)
    with pytest.raises(ValueError, match=f'{name}_value=1e-05 .* peak_value=5e-06'):
      schedule(0)
  constant = optimizers.warmup_schedule(low, 10, 0, 'constant', **ends)
  np.testing.assert_allclose(constant(9), low)
