"""The action inside a training run, with two linear towers: when it runs, what it writes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest

from het_plugin.evaluation.zeroshot_action import ZeroShotAction
from het_plugin.evaluation.zeroshot_datasets import ZeroShotDataset
from het_plugin.training.actions import ActionContext
from het_plugin.training.optimizers import OptaxWrapper
from het_plugin.training.partitioning import PjitPartitioner
from het_plugin.training.state import TrainState
from tests.evaluation.fake_contrastive import FakeContrastive, Letters

SIZE = 8
DIGITS = ZeroShotDataset('digits', 'digits', 'test[:64]', 'none')


class Writer:
  def __init__(self):
    self.scalars = {}

  def write_scalars(self, step, scalars):
    self.scalars[step] = dict(scalars)


def make_context(model_dir, model=None):
  optimizer = OptaxWrapper(optax.sgd(0.1))
  towers = FakeContrastive(optimizer)
  partitioner = PjitPartitioner(num_partitions=2)
  model = model or towers
  context = ActionContext(model, partitioner, Writer(), str(model_dir), 0, 0)
  variables = towers.get_initial_variables(jax.random.key(0), {'image': (1, SIZE, SIZE, 1)})
  state = TrainState.create(optimizer, variables)
  specs = partitioner.get_mesh_axes(state).params
  return context, state.replace(params=jax.device_put(state.params, partitioner.shardings(specs)))


def at(state, step):
  return state.replace(step=jnp.asarray(step, jnp.int32))


def make_action(**kwargs):
  defaults = {'tokenizer': Letters(), 'datasets': (DIGITS,), 'batch_size': 32}
  return ZeroShotAction(image_size=SIZE, channels=1, **(defaults | kwargs))


def records(model_dir):
  return [json.loads(line) for line in (model_dir / 'zeroshot.jsonl').read_text().splitlines()]


def test_scalars_and_lines(tmp_path):
  context, state = make_context(tmp_path)
  other = dataclasses.replace(DIGITS, name='other', templates=('a {}', '{} b'))
  action = make_action(datasets=(DIGITS, other))
  action.setup(context)
  assert action.run(at(state, 7), {}) is False
  found = action.results['digits']
  assert found.num_examples == 64 and 0 < found.top1 < found.top5 < 1
  assert context.writer.scalars[7] == {
    f'zeroshot/{name}/{key}': getattr(action.results[name], key)
    for name in ('digits', 'other')
    for key in ('top1', 'top5')
  }
  first, second = records(tmp_path)
  assert first == {'step': 7, 'dataset': 'digits', **dataclasses.asdict(found)}
  assert second['dataset'] == 'other'


def test_classes_are_embedded_by_the_current_text_tower(tmp_path):
  context, state = make_context(tmp_path)
  action = make_action()
  action.setup(context)
  action.run(at(state, 1), {})
  before = action.results['digits']
  text = state.params['text']
  rolled = jax.device_put(jnp.roll(text, 1, axis=0), text.sharding)
  changed = state.replace(params={**state.params, 'text': rolled})
  action.run(at(changed, 2), {})
  assert action.results['digits'] != before
  action.run(at(state, 3), {})
  assert action.results['digits'] == before
  assert context.model.traces == 1


@pytest.mark.parametrize(
  'change,message',
  [
    ({'period': 0}, 'ZeroShotAction.period=0'),
    ({'datasets': (DIGITS, DIGITS)}, r"distinct names; they are \['digits', 'digits'\]"),
    ({'batch_size': 6}, 'batch_size=6'),
    ({'datasets': (ZeroShotDataset('x', 'no_such_task'),)}, 'no_such_task'),
  ],
)
def test_bad_settings_are_one_sentence_before_training(tmp_path, change, message):
  context, _ = make_context(tmp_path)
  with pytest.raises(ValueError, match=message):
    make_action(**change).setup(context)


def test_a_classifier_is_refused(tmp_path):
  context, _ = make_context(tmp_path, model=object())
  with pytest.raises(ValueError, match='object has no image_embeddings'):
    make_action().setup(context)
