"""What a run under t5x leaves of its configuration. t5x itself is not needed."""

import types

import pytest
from absl import flags

import gin
from het_plugin import data
from het_plugin.config import parsing
from het_plugin.hosts.t5x import config, datasets
from het_plugin.training import class_names


def configure(head):
  files = ['runs/digits_smoke', f'heads/{head}']
  parsing.parse_config([f'het_plugin/gin/{file}.gin' for file in files], ["MODEL_DIR = 'unused'"])


def test_a_run_is_not_resumed_with_another_head(tmp_path, monkeypatch):
  configure('het_xl')
  config.summarize_config(tmp_path, None, 0)
  config.summarize_config(tmp_path, None, 4)  # the same run, resumed
  saved = (tmp_path / 'config.gin').read_text()
  assert 'HetXL.num_factors' in saved
  configure('det')
  with pytest.raises(ValueError, match='step 4.*HEAD'):
    config.summarize_config(tmp_path, None, 4)
  assert (tmp_path / 'config.gin').read_text() == saved
  with monkeypatch.context() as patch:
    text = gin.config_str() + 'summarize_config.accept_changes = True\n'
    patch.setattr(gin, 'config_str', lambda: text)
    config.summarize_config(tmp_path, None, 4, accept_changes=True)
  config.summarize_config(tmp_path, None, 6)  # without the binding it is the same run
  assert 'HetXL' not in (tmp_path / 'config.gin').read_text()
  assert (tmp_path / 'config_until_4.gin').read_text() == saved


def test_a_misspelt_binding_is_refused_before_a_write(tmp_path, monkeypatch):
  typed = flags.FlagValues()
  flags.DEFINE_multi_string('gin_bindings', ['EVALPERIOD = 3'], '', typed)
  monkeypatch.setattr(flags, 'FLAGS', typed)
  configure('det')
  with gin.unlock_config():  # t5x parses without our checks
    gin.parse_config('EVALPERIOD = 3')
  with pytest.raises(ValueError, match='EVALPERIOD = 3 is used by nothing: did you mean EVAL_PER'):
    config.summarize_config(tmp_path / 'run', None, 0)
  assert not (tmp_path / 'run').exists()


def test_an_evaluation_does_not_replace_the_configuration_of_a_run(tmp_path):
  config.summarize_evaluation(tmp_path / 'eval', None, 0)
  assert (tmp_path / 'eval/config.gin').exists()
  (tmp_path / 'run/checkpoint_4/state').mkdir(parents=True)
  with pytest.raises(ValueError, match='run holds a run.*EVAL_OUTPUT_DIR'):
    config.summarize_evaluation(tmp_path / 'run', None, 0)


def test_a_run_keeps_the_names_of_its_classes(tmp_path):
  model = types.SimpleNamespace(validate=lambda info: None)
  cfg = data.DatasetConfig('digits', {'image': 8, 'label': 1}, 'train', batch_size=8)

  def start():
    datasets.get_dataset(cfg, 0, 1, None, model=model, model_dir=tmp_path)

  start()
  (tmp_path / 'checkpoint_4/state').mkdir(parents=True)
  names = class_names.read(tmp_path)
  assert names == tuple('0123456789')
  class_names.write(tmp_path, names[::-1])
  with pytest.raises(ValueError, match="'0' is class 0 here and class 9 in the training data"):
    start()
