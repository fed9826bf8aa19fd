"""A setting out of its range is one sentence with setting, value and range, also without gin."""

import inspect

import numpy as np
import pytest

from het_plugin.backbones.moe import SparseMoe
from het_plugin.backbones.resnet import resnet
from het_plugin.backbones.vit import vit
from het_plugin.data import DatasetConfig
from het_plugin.system import ranges
from het_plugin.training import actions, optimizers

CFG = {'mixture_or_task_name': 'digits', 'task_feature_lengths': {}, 'split': 'train'}


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: vit('S/16', depth=0), 'ViT.depth=0 must be at least 1'),
    (lambda: vit('S/16', depth=1.5), 'ViT.depth=1.5 must be a whole number, at least 1'),
    (lambda: vit('S/16', pooling='x'), "ViT.pooling='x' must be one of 'token', 'gap', 'map'"),
    (lambda: vit('S/16', adapter_dim=0), 'ViT.adapter_dim=0 must be at least 1 or None'),
    (lambda: resnet(stages=()), 'ResNet.stages=() must be a list that is not empty'),
    (lambda: resnet(stages=(1, 0)), 'ResNet.stages=(1, 0) must be a list, each part at least 1'),
    (lambda: SparseMoe(4, capacity=np.nan), 'SparseMoe.capacity=nan must be above 0'),
    (lambda: optimizers.adamw(0.1, b1=1), 'adamw.b1=1 must be in [0, 1)'),
    (lambda: optimizers.adamw(0.1, b1='a'), "adamw.b1='a' must be a number"),
    (
      lambda: optimizers.adamw(0.1, frozen_params='('),
      "adamw.frozen_params='(' must be a regular expression: missing ), ",
    ),
    (
      lambda: actions.EarlyStoppingAction(('a', 'nll'), 'min', 1),
      'EarlyStoppingAction.patience=1 must be at least 2',
    ),
    (lambda: DatasetConfig(**CFG, batch_size=0), 'DatasetConfig.batch_size=0 must be at least 1'),
  ],
)
def test_a_value_out_of_range(make, message):
  with pytest.raises(ValueError) as error:
    make()
  assert str(error.value).startswith(message) and '\n' not in str(error.value)


def test_a_fixed_list_says_its_parts_where_they_are_of_one_kind():
  pair = tuple[ranges.Count, ranges.Count]
  counts = tuple[ranges.Count, ...]
  assert ranges.mismatch((0, 1), pair) == 'a list of 2 (each a whole number, at least 1)'
  assert ranges.mismatch(((1,), (0,)), tuple[counts, counts]) == (
    'a list, each part a list, each part at least 1'
  )
  assert ranges.mismatch(((1,),), tuple[counts, counts]) == 'a list of 2'
  assert ranges.mismatch(((1, 2), (0, 2)), tuple[pair, pair]) == (
    'a list, each part a list of 2 (each a whole number, at least 1)'
  )


def test_a_right_value_and_a_signature_stay_as_they_are():
  with pytest.raises(TypeError, match=r"adamw\(\) got an unexpected keyword argument 'beta1'"):
    optimizers.adamw(0.1, beta1=0.9)
  assert vit('S/16', depth=np.int64(2), adapter_dim=None).depth == 2
  assert 'b1' in inspect.getfullargspec(optimizers.adamw).kwonlyargs
