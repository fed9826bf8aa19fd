"""Wrong bindings are one sentence that names the binding, its value and what would be right."""

from typing import Annotated

import numpy as np
import pytest

import gin
from het_plugin.config import parsing, registry

RUN = ['het_plugin/gin/runs/digits_smoke.gin', 'het_plugin/gin/heads/het_xl.gin']


@pytest.fixture(autouse=True)
def registered():
  registry.register_trainer()


@pytest.mark.parametrize(
  'binding, message',
  [
    ('train/Integrator.num_samples = 1.5', 'Integrator.num_samples = 1.5 must be a whole number'),
    ("MODEL_DIR = ''", "MODEL_DIR = '' (train.model_dir) must be a path"),
    ("TASK_FEATURE_LENGTHS = {'image': 'a'}", 'must be a dict, each value a whole number'),
    ('train.profile_steps = (1,)', 'train.profile_steps = (1,) must be a list of 2 (each '),
    ('HetXL.temperature = 1.0', 'must be a FixedTemperature: @...() or a LearnedTemperature'),
    ('vit.depth = 1.5', 'vit.depth = 1.5 must be a whole number'),  # a field of what vit() makes
    ('adamw.b1 = 2.0', 'adamw.b1 = 2.0 must be in [0, 1)'),
    ('SAVE_PERIOD = 0', 'SAVE_PERIOD = 0 (SaveCheckpointConfig.period) must be at least 1'),
    (
      "NonFinitePolicy.action = 'go'",
      "NonFinitePolicy.action = 'go' must be one of 'stop', 'skip'",
    ),
    ("RestoreCheckpointConfig.assignment_map = (('[', None),)", 'a regular expression: untermin'),
    ("adamw.frozen_params = '^head/('", 'a regular expression: missing )'),
    ('MODEL_DIR = None', 'MODEL_DIR = None (train.model_dir) must be a path'),
    ('HEAD = @HetXL', 'HEAD = @HetXL (ClassificationModel.head) must be a Module: @...()'),
    ('TRAIN_STEP = 5', 'TRAIN_STEP = 5 is used by nothing: did you mean TRAIN_STEPS?'),
    ('A = (1, %A)', 'the macro A refers to itself'),
    (f'TRAIN_STEPS = {2**31}', f'TRAIN_STEPS = {2**31} (total_steps.steps) must be in [1, 2147483'),
    (
      'BATCH_SIZE = 1e11',
      'BATCH_SIZE = 100000000000.0 (train/DatasetConfig.batch_size) must be a wh',
    ),
    (f'BATCH_SIZE = {10**11}', '(train/DatasetConfig.batch_size) must be in [1, 2147483648)'),
    (
      'BATCH_SIZE = @adamw()',
      'BATCH_SIZE = @adamw() (train/DatasetConfig.batch_size) must be a who',
    ),
    ('vit.variant = @HetXL()', "vit.variant = @HetXL() must be text: '...'"),
    ('LEARNING_RATE = 1e400', 'LEARNING_RATE = inf must be finite'),
    ('eval/adamw.learning_rate_factors = (("a", 1e400),)', 'adamw.learning_rate_factors = (('),
  ],
)
def test_a_wrong_binding(binding, message):
  with pytest.raises(ValueError) as error:
    parsing.parse_config(RUN, ["MODEL_DIR = 'x'", binding])
  assert message in str(error.value) and '\n' not in str(error.value)


def test_annotations_of_others_are_read_as_they_are_meant():
  @gin.configurable('others', module='tests')
  def others(size: int = None, rate: Annotated[float, object()] = 1.0, array: np.ndarray = 0.0):
    del size, rate, array

  right = ['others.size = None', 'others.rate = 2', 'others.array = 3.0']
  parsing.parse_config(RUN, ["MODEL_DIR = 'x'", *right])
  with pytest.raises(ValueError, match="others.rate = 'a' must be a number"):
    parsing.parse_config(RUN, ["MODEL_DIR = 'x'", "others.rate = 'a'"])


def test_right_bindings_and_references_pass():
  extra = ['TRAIN_STEPS = 15', 'LEARNING_RATE = 1', 'adamw.learning_rate = @warmup_schedule()']
  extra += ['adamw.b1 = 0', 'train.profile_steps = (1, 2)', 'OWN = 3', 'HetXL.temperature = None']
  parsing.parse_config(RUN, ["MODEL_DIR = 'x'", *extra])


def test_a_file_in_another_encoding_is_named(tmp_path):
  path = tmp_path / 'latin.gin'
  path.write_bytes('A = "é"'.encode('latin-1'))
  with pytest.raises(ValueError, match='latin.gin.*UTF-8'):
    parsing.parse_config([str(path)], [])


def test_a_file_that_includes_itself(tmp_path):
  path = tmp_path / 'circle.gin'
  path.write_text(f"include '{path}'\n")
  with pytest.raises(ValueError, match='circle.gin.*includes itself'):
    parsing.parse_config([str(path)], [])
