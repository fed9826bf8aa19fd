"""The heads in Kauldron, which docs/kauldron.md says how to get: layer, loss, metric and data, and
the example trained by Kauldron's own loop.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from het_plugin.heads import Det, HetXL, LearnedTemperature
from het_plugin.integrate import Integrator, example_keys
from tests.hosts import kauldron_run

kd = pytest.importorskip('kauldron.kd', reason='needs Kauldron: docs/kauldron.md says how')
from het_plugin.hosts import kauldron as het  # noqa: E402

ROOT = Path(__file__).parents[2]
PHI = jax.random.normal(jax.random.key(0), (4, 6))
LABELS = jnp.array([[0], [1], [2], [1]])


def outputs(head, stream='default'):
  """What Head returns in training, and its parameters."""
  layer = het.Head(head)
  rngs = {'params': jax.random.key(1), stream: jax.random.key(2)}
  return layer.init_with_output(rngs, PHI, is_training_property=True)


def test_the_loss_is_that_of_the_integrator():
  out, params = outputs(HetXL(3, num_factors=2))
  assert set(params['params']) == {'head'}
  nll = jax.jit(Integrator().nll)(out['gaussian'], LABELS, out['keys'])
  fields = {'labels': LABELS, 'gaussian': out['gaussian'], 'keys': out['keys']}
  loss = jax.jit(lambda fields: het.Nll()(**fields))(fields)
  np.testing.assert_allclose(loss, nll.mean(), rtol=1e-6)
  mask = jnp.array([[1.0], [0.0], [1.0], [0.0]])
  loss = jax.jit(lambda fields: het.Nll(weight=0.5)(**fields))(fields | {'mask': mask})
  np.testing.assert_allclose(loss, 0.5 * (nll[0] + nll[2]) / 2, rtol=1e-6)


def test_rows_whose_mask_is_0_cannot_make_the_loss_nan():
  layer = het.Head(Det(3))
  params = layer.init(jax.random.key(1), PHI, is_training_property=False)
  labels = LABELS.at[1].set(7)  # no class
  mask = jnp.array([[1.0], [0.0], [1.0], [1.0]])

  @jax.jit
  @jax.value_and_grad
  def found(params, phi, labels, mask):
    out = layer.apply(params, phi, is_training_property=False)
    return het.Nll()(labels=labels, gaussian=out['gaussian'], keys=out['keys'], mask=mask)

  expected = found(params, PHI, LABELS, mask)
  jax.tree.map(np.testing.assert_array_equal, found(params, PHI, labels, mask), expected)
  loss, _ = found(params, PHI.at[1].set(jnp.nan), labels, mask)
  np.testing.assert_array_equal(loss, expected[0])
  assert np.isnan(found(params, PHI, labels, jnp.ones((4, 1)))[0])


def test_their_losses_of_the_logits_are_ours():
  out, _ = outputs(HetXL(3, num_factors=2))
  log_p = Integrator().log_prob(out['gaussian'], out['keys'])[jnp.arange(4), LABELS[:, 0]]
  theirs = kd.losses.SoftmaxCrossEntropyWithIntLabels()(logits=out['logits'], labels=LABELS)
  np.testing.assert_allclose(theirs, -log_p.mean(), rtol=1e-5)

  out, _ = outputs(HetXL(3, num_factors=2, link='sigmoid'))
  nll = Integrator().nll(out['gaussian'], LABELS)  # sums over the 3 classes
  on = jax.nn.one_hot(LABELS[:, 0], 3)
  theirs = kd.losses.SigmoidBinaryCrossEntropy()(logits=out['logits'], labels=on)
  np.testing.assert_allclose(theirs * 3, nll.mean(), rtol=1e-5)


def test_draws_differ_by_row_and_key_and_are_fixed_in_evaluation():
  out, params = outputs(HetXL(3, num_factors=2))
  layer = het.Head(HetXL(3, num_factors=2))

  def draws(is_training, **rngs):
    keys = layer.apply(params, PHI, rngs=rngs, is_training_property=is_training)['keys']
    return {tuple(row) for row in np.asarray(jax.random.key_data(keys))}

  first, second = (draws(True, default=jax.random.key(seed)) for seed in (3, 4))
  assert len(first | second) == 8
  fixed = draws(False)
  assert draws(False) == fixed and len(fixed) == 4
  assert len(fixed | draws(False, default=jax.random.key(5))) == 8  # RngStream(eval=True)


def test_logits_that_no_metric_reads_are_not_computed():
  head = HetXL(3, num_factors=2)
  _, params = outputs(head)
  rngs = {'default': jax.random.key(3)}
  loss = het.Nll()

  def of_layer(params):
    out = het.Head(head).apply(params, PHI, rngs=rngs, is_training_property=True)
    return loss(labels=LABELS, gaussian=out['gaussian'], keys=out['keys'])

  def of_head(params):
    keys = example_keys(jax.random.key(3), jnp.arange(4))
    gaussian = head.apply({'params': params['params']['head']}, PHI)
    return loss(labels=LABELS, gaussian=gaussian, keys=keys)

  costs = [jax.jit(f).lower(params).compile().cost_analysis() for f in (of_layer, of_head)]
  assert costs[0]['flops'] == pytest.approx(costs[1]['flops'], rel=0.02)


def test_the_temperature_does_not_decay():
  _, params = outputs(HetXL(3, num_factors=2, temperature=LearnedTemperature()))
  decayed = kd.optim.exclude('temperature')(params['params'])['head']
  assert decayed.pop('temperature') == {'t': False} and all(jax.tree.leaves(decayed))


def test_calibration_error_is_that_of_numpy():
  rng = np.random.default_rng(0)
  logits = 2 * rng.normal(size=(40, 5)).astype(np.float32)
  labels = rng.integers(0, 5, (40, 1))
  mask = rng.random((40, 1)) < 0.7
  metric = het.CalibrationError(labels='batch.label')
  parts = [metric.get_state(labels[i], logits[i], mask[i]) for i in np.split(np.arange(40), 2)]
  found = parts[0].merge(parts[1]).finalize().compute()

  odds = np.exp(logits[mask[:, 0]])
  confidence = (odds / odds.sum(1, keepdims=True)).max(1)
  correct = logits.argmax(1)[mask[:, 0]] == labels[mask]
  edges = np.linspace(0, 1, 16)
  gap = sum(
    abs((correct[i] - confidence[i]).sum())
    for i in ((confidence > a) & (confidence <= b) for a, b in zip(edges, edges[1:], strict=False))
  )
  np.testing.assert_allclose(found, gap / mask.sum(), rtol=1e-5)


def test_a_task_is_read_by_number():
  source = het.Task(name='digits', split='test', size=8, shuffle=False).data_source
  example = source[5]
  assert len(source) == 359
  assert example['image'].shape == (8, 8, 1) and np.abs(example['image']).max() <= 1
  assert example['label'].shape == (1,) and example['mask'] == [1.0]


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('glyph_names', "Task.name='glyph_names' must have class labels, without weights"),
    ('glyphs_core', "Task.split='train' of 'glyphs_core' is endless: take one that ends"),
  ],
)
def test_a_task_that_kauldron_cannot_read_is_one_sentence(name, message):
  with pytest.raises(ValueError, match=message):
    het.Task(name=name, split='train', size=16, shuffle=False).data_source  # noqa: B018


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """{devices: folder} of the example: in one go on one device; stopped and resumed on four."""
  runs = {}
  programs = []
  for devices, stops in ((1, [5]), (4, [3, 5])):
    runs[devices] = tmp_path_factory.mktemp('kauldron')
    flags = re.sub(r'(device_count)=\d+', rf'\1={devices}', os.environ['XLA_FLAGS'])
    programs.append(
      subprocess.Popen(
        [sys.executable, kauldron_run.__file__, runs[devices], *map(str, stops)],
        cwd=ROOT,
        env=os.environ
        | {'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path]), 'XLA_FLAGS': flags},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
  for program in programs:
    _, errors = program.communicate()
    assert program.returncode == 0, errors[-3000:]
  return runs


def written(folder, collection, name):
  """{step: value} of event files."""
  from tensorboard.backend.event_processing import event_accumulator
  from tensorboard.util import tensor_util

  events = event_accumulator.EventAccumulator(str(folder / collection))
  events.Reload()
  return {e.step: float(tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(name)}


@pytest.mark.slow
def test_a_run_is_the_same_on_four_devices_and_after_a_stop(runs):
  one, four = (written(runs[devices], 'train', 'losses/nll') for devices in (1, 4))
  assert list(one) == list(four) == [0, 1, 2, 3, 4] and one[4] < one[0]
  np.testing.assert_allclose(list(one.values()), list(four.values()), rtol=1e-4)
  metrics = [f'metrics/{name}' for name in ('accuracy', 'nll', 'ece', 'tau')]
  for name in ('losses/nll', *metrics):
    one, four = (written(runs[devices], 'eval', name)[4] for devices in (1, 4))
    np.testing.assert_allclose(one, four, rtol=1e-4)
  right = 359 * written(runs[1], 'eval', 'metrics/accuracy')[4]  # padded rows do not count
  assert abs(right - round(right)) < 1e-3


@pytest.mark.slow
def test_the_first_step_of_a_run_is_a_call_of_the_integrator(runs, tmp_path):
  trainer = kd.konfig.resolve(kauldron_run.config(tmp_path))
  batch = next(iter(trainer.train_ds))
  context = kd.train.Context.from_state_and_batch(state=trainer.init_state(), batch=batch)
  rngs = trainer.rng_streams.train_rngs(0)
  preds = jax.jit(
    lambda x: kd.train.forward(x, model=trainer.model, rngs=rngs, is_training=True).preds
  )(context)
  nll = jax.jit(Integrator().nll)(preds['gaussian'], batch['label'], preds['keys'])
  np.testing.assert_allclose(nll.mean(), written(runs[1], 'train', 'losses/nll')[0], rtol=1e-5)


@pytest.mark.parametrize(
  ('head', 'stream', 'message'),
  [
    (nn.Dense(3), 'default', 'Head.head=Dense must return GaussianLogits, as Det, Het, HetH'),
    (HetXL(3), 'noise', "Head.rng_stream='noise' is no rng stream of the training"),
    (HetXL, 'default', r'Head.head=.*HetXL.* must be a linen module: HetXL\(num_classes=1000\)'),
  ],
)
def test_a_wrong_layer_is_one_sentence(head, stream, message):
  with pytest.raises(ValueError, match=message):
    layer = het.Head(head, rng_stream=stream)
    rngs = {'params': jax.random.key(0), 'default': jax.random.key(1)}
    jax.eval_shape(lambda: layer.init(rngs, PHI, is_training_property=True))


def test_a_number_of_samples_is_no_integrator():
  for name, make in {'Head': functools.partial(het.Head, Det(3)), 'Nll': het.Nll}.items():
    with pytest.raises(ValueError, match=f'{name}.integrator=64 must be an Integrator'):
      make(integrator=64)


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    (
      'labels',
      LABELS[:, 0],
      r"Nll.labels='batch.label' must be class ids, int \[B, L\] with B = 4",
    ),
    ('labels', jnp.ones((4, 3)), r'they are float32 \[4, 3\]'),
    ('labels', LABELS[:3], r'they are int32 \[3, 1\]'),
    ('gaussian', jnp.ones((4, 3)), "Nll.gaussian='preds.gaussian' must be the GaussianLogits of"),
  ],
)
def test_a_wrong_loss_is_one_sentence(field, value, message):
  out, _ = outputs(Det(3))
  fields = {'labels': LABELS, 'gaussian': out['gaussian'], 'keys': out['keys'], field: value}
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(het.Nll(labels='batch.label').get_values, **fields)


def test_labels_of_more_classes_than_the_head_are_one_sentence_with_user_checks():
  out, _ = outputs(HetXL(3, num_factors=2))
  loss = checkify.checkify(
    jax.grad(
      lambda x: het.Nll(labels='batch.label')(labels=LABELS + 1, gaussian=x, keys=out['keys'])
    ),
    errors=checkify.user_checks,
  )
  error, _ = jax.jit(loss)(out['gaussian'])
  with pytest.raises(ValueError, match="Nll.labels='batch.label' must be below K = 3"):
    error.throw()


def test_a_wrong_shape_of_labels_of_a_metric_is_one_sentence():
  with pytest.raises(ValueError, match=r"CalibrationError.labels='y' must be \[B, 1\] with B = 4"):
    het.CalibrationError(labels='y').get_state(LABELS[:, 0], jnp.ones((4, 3)))
