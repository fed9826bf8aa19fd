"""The actions inside a training run: when they run, what they write, on digits."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from het_plugin import data
from het_plugin.backbones import ViT
from het_plugin.data.preprocess import ResizeAndCrop
from het_plugin.evaluation.actions import FewShotAction, PeriodicAction, ZeroShotAction
from het_plugin.evaluation.fewshot import FewShotDataset
from het_plugin.evaluation.zeroshot_datasets import ZeroShotDataset
from het_plugin.heads import Det
from het_plugin.integrate import Integrator
from het_plugin.models import ClassificationModel
from het_plugin.system import sheets
from het_plugin.training.actions import ActionContext
from het_plugin.training.optimizers import OptaxWrapper
from het_plugin.training.partitioning import PjitPartitioner
from het_plugin.training.state import TrainState
from tests.evaluation.small_contrastive import Letters, SmallContrastive
from tests.training import toy, toy_run
from tests.training.toy_run import lines

DIGITS = FewShotDataset('digits', 'digits')
SIZE = 8


class Writer:
  def __init__(self):
    self.scalars = {}

  def write_scalars(self, step, scalars):
    self.scalars[step] = dict(scalars)


class Model(ClassificationModel):
  """Counts how often its representations are traced, hence compiled."""

  traces = 0

  def representations(self, *args, **kwargs):
    self.traces += 1
    return super().representations(*args, **kwargs)


def make_context(model_dir, model=None):
  """With the state of a tiny ViT, or of `model`."""
  optimizer = OptaxWrapper(optax.sgd(0.1))
  if model is None:
    backbone = ViT(patch_size=4, width=32, depth=1, mlp_dim=32, num_heads=2, pooling='gap')
    integrator = Integrator(num_samples=2)
    model = Model(backbone, Det(num_classes=10), optimizer, integrator, integrator)
  partitioner = PjitPartitioner(num_partitions=2)
  context = ActionContext(model, partitioner, Writer(), str(model_dir), 0, 0)
  shapes = {'image': (8, SIZE, SIZE, 1), 'text': (8, 12)}

  @jax.jit
  def init():
    return TrainState.create(optimizer, model.get_initial_variables(jax.random.key(0), shapes))

  state = init()
  specs = partitioner.get_mesh_axes(state).params
  return context, state.replace(params=jax.device_put(state.params, partitioner.shardings(specs)))


def at(state, step):
  return state.replace(step=jnp.asarray(step, jnp.int32))


def make_action(**kwargs):
  defaults = {'shots': (1, 5), 'seeds': (0, 1), 'datasets': (DIGITS,), 'batch_size': 128}
  return FewShotAction(**({'image_size': SIZE, 'channels': 1} | defaults | kwargs))


@pytest.mark.slow
def test_digits_over_the_mesh(tmp_path):
  context, state = make_context(tmp_path)
  action = make_action(shots=(1, 25))
  action.setup(context)
  context.model.traces = 0
  assert action.run(at(state, 7), {}) is False

  by_shots = action.results['digits']
  assert by_shots[25].mean > 0.5  # random features of a digit are far above chance, 0.1
  scalars = context.writer.scalars[7]
  assert set(scalars) == {
    f'fewshot/digits/{s}shot{suffix}' for s in (1, 25) for suffix in ('', '_stderr')
  }
  assert scalars['fewshot/digits/25shot'] == by_shots[25].mean
  assert [(r['step'], r['dataset'], r['shots']) for r in lines(tmp_path / 'fewshot.jsonl')] == [
    (7, 'digits', s) for s in (1, 25)
  ]
  assert lines(tmp_path / 'fewshot.jsonl')[-1]['accuracies'] == list(by_shots[25].accuracies)
  assert context.model.traces == 1  # both splits
  action.run(at(state, 8), {})
  assert context.model.traces == 1


class Counting(PeriodicAction):
  """Evaluates nothing."""

  kind = 'fewshot'

  def check(self, run, dataset):
    pass

  def evaluate(self, run):
    return [('digits', types.SimpleNamespace(scalars=lambda: {'x': 1.0}, record=dict))]


def evaluated(model_dir, steps, *, total_steps=None, evaluated_step=0):
  """Which of the steps an action with period 10 evaluates."""
  writer = Writer()
  action = Counting(
    image_size=8, channels=1, datasets=(DIGITS,), period=10, total_steps=total_steps
  )
  mesh = types.SimpleNamespace(get_mesh_axes=lambda state: state)
  action.setup(ActionContext(None, mesh, writer, str(model_dir), 0, evaluated_step))
  for step in steps:
    action.run(types.SimpleNamespace(step=step, params=None), {})
  return list(writer.scalars)


def test_period_and_final_step(tmp_path):
  assert evaluated(tmp_path, (5, 10, 15, 20, 25, 27), total_steps=27) == [5, 15, 25, 27]


def test_resume_neither_repeats_nor_duplicates(tmp_path):
  evaluated(tmp_path, (10, 20, 30))
  assert evaluated(tmp_path, (35, 40), evaluated_step=34) == [40]
  assert [r['step'] for r in lines(tmp_path / 'fewshot.jsonl')] == [10, 20, 30, 40]
  # Lines of later steps do not count for a run that goes back, though one of them is due again.
  assert evaluated(tmp_path, (20, 25, 30), evaluated_step=19) == [20, 30]
  assert [r['step'] for r in lines(tmp_path / 'fewshot.jsonl')] == [10, 20, 30]


def test_bounds_and_endless_splits(tmp_path):
  context, state = make_context(tmp_path)
  endless = FewShotDataset('core', 'glyphs_core', 'train', 'validation', max_train=64, max_test=64)
  bounded = FewShotDataset('few', 'digits', max_train=150, max_test=40)
  action = make_action(datasets=(endless, bounded), shots=(5,), batch_size=64)
  action.setup(context)
  action.run(state, {})
  assert action.results['core'][5].classes_short == 64  # 64 of 2,297 classes, once each
  assert action.results['few'][5].classes_short == 0  # the choice is not the first few classes
  assert (np.array(action.results['few'][5].accuracies) * 40 % 1 < 1e-9).all()

  unbounded = make_action(datasets=(FewShotDataset('core', 'glyphs_core', 'train', 'validation'),))
  with pytest.raises(ValueError, match="'train' .*'glyphs_core' .*endless"):
    unbounded.setup(context)


@pytest.mark.parametrize(
  'change,message',
  [
    ({'datasets': (DIGITS, DIGITS)}, r"datasets .*\['digits', 'digits'\]"),
    (
      {'layer': 'no_such_layer'},
      "^FewShotAction.layer='no_such_layer', image_size=8, .* choose from .*block00",
    ),
  ],
)
def test_bad_settings_are_one_sentence(tmp_path, change, message):
  context, _ = make_context(tmp_path)
  with pytest.raises(ValueError, match=message):
    make_action(**change).setup(context)


@pytest.mark.parametrize('resize', [None, ResizeAndCrop('patches', patch_size=2, max_patches=9)])
def test_pictures_of_any_aspect_are_made_as_in_the_training(tmp_path, resize):
  tower = ViT(2, 8, 1, 8, 2, pooling='gap', naflex='bilinear', stored_grid=3)
  integrator = Integrator(num_samples=2)
  model = Model(tower, Det(num_classes=10), None, integrator, integrator)
  context = ActionContext(model, PjitPartitioner(), Writer(), str(tmp_path), 0, resize=resize)
  dataset = FewShotDataset('digits', 'digits', max_train=20, max_test=20)
  action = make_action(shots=(1,), seeds=(0,), datasets=(dataset,), batch_size=8)
  if resize is None:
    message = 'resize=None makes squares, and the model takes pictures'
    with pytest.raises(ValueError, match=message):
      action.setup(context)
    with pytest.raises(ValueError, match=message):
      cfg = data.one_pass('digits', 'train', image_size=8, batch_size=8, bounded=True)
      toy_run.run(tmp_path, model=model, train_dataset_cfg=cfg, task_info_fn=data.task_info)
    return
  action.setup(context)
  with action._run.open_split('train', 8, task='digits', batch_size=8) as (batches, _):
    assert (sheets.grid_of(next(batches)['image']) == 3).all()


FEW_DIGITS = ZeroShotDataset('digits', 'digits', 'test[:64]', 'none')


def make_zeroshot(**kwargs):
  defaults = {'tokenizer': Letters(), 'datasets': (FEW_DIGITS,), 'batch_size': 32}
  return ZeroShotAction(**({'image_size': SIZE, 'channels': 1} | defaults | kwargs))


@pytest.mark.parametrize('make', [make_action, make_zeroshot])
def test_images_that_the_model_does_not_take_end_the_setup(tmp_path, make):
  shapes = {'image': (16, SIZE, SIZE, 1), 'text': (16, 12)}

  def set_up(model=None, **change):
    model = model or SmallContrastive()
    context = ActionContext(model, PjitPartitioner(), Writer(), str(tmp_path), 0)
    make(**change).setup(dataclasses.replace(context, input_shapes=shapes))

  set_up()
  for given in ({'image_size': 12, 'channels': 1}, {'image_size': 8, 'channels': 3}):
    said = ', '.join(f'{name}={value}' for name, value in given.items())
    with pytest.raises(ValueError, match=f'Action.{said} do not .* image_size=8, channels=1$'):
      set_up(**given)
  with pytest.raises(ValueError, match='Action.*image_size=10, channels=1: ViT.patch_size=4 must'):
    set_up(image_size=10)
  # Position embeddings that are not learned suit any number of patches.
  set_up(SmallContrastive(position='sincos2d'), image_size=12)
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_wrong_images_end_a_run_before_it_compiles_its_step_or_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(toy_run.Trainer, 'compile_train', lambda *args: pytest.fail('compiled'))
  context, _ = make_context(tmp_path)
  words = f'image_size=8, channels=1 do not .* image_size={toy.SIDE}, channels=1$'
  with pytest.raises(ValueError, match=words):
    toy_run.run(
      tmp_path,
      model=context.model,
      task_info_fn=lambda task: data.task_info('digits'),
      actions={'TRAIN_EVAL': [make_action()]},
    )
  assert {path.name for path in tmp_path.iterdir()} <= {'lock', 'logs', 'compilation_cache'}


@pytest.mark.slow
def test_classes_are_embedded_by_the_current_text_tower(tmp_path):
  context, state = make_context(tmp_path, model=SmallContrastive())
  make_action(layer='block00').setup(context)
  with pytest.raises(ValueError, match="FewShotAction.layer='block01'"):
    make_action(layer='block01').setup(context)
  action = make_zeroshot()
  action.setup(context)
  context.model.traces = 0
  action.run(at(state, 1), {})
  before = action.results['digits']
  tower = state.params['text_tower']
  rolled = jax.tree.map(lambda x: jax.device_put(jnp.roll(x, 1, axis=0), x.sharding), tower)
  changed = state.replace(params={**state.params, 'text_tower': rolled})
  action.run(at(changed, 2), {})
  assert action.results['digits'] != before
  action.run(at(state, 3), {})
  assert action.results['digits'] == before
  assert context.model.traces == 1
