import os
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from het_plugin.training import checkpoints, compilation_cache
from het_plugin.training import step as step_lib
from tests.training import toy_run

SAVE = checkpoints.CheckpointConfig(checkpoints.SaveCheckpointConfig(period=1))


@pytest.fixture
def no_cache():
  """JAX without a configured cache, as most users have it."""
  before = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', None)
  jax_cache.reset_cache()
  yield
  jax.config.update('jax_compilation_cache_dir', before)
  jax_cache.reset_cache()


@pytest.fixture
def hits():
  """Names of JAX's events; a hit is one of them."""
  events = []

  def listen(event, **_):
    events.append(event)

  monitoring.register_event_listener(listen)
  yield lambda: events.count('/jax/compilation_cache/cache_hits')
  monitoring.unregister_event_listener(listen)


@pytest.mark.slow
@pytest.mark.usefixtures('no_cache')
def test_a_restart_reads_what_the_run_compiled_and_ends_where_it_would_have(tmp_path, hits):
  settings = {'train_eval_dataset_cfg': None, 'checkpoint_cfg': SAVE}
  settings['trainer_cls'] = step_lib.Trainer
  _, whole = toy_run.run(tmp_path, total_steps=2, **settings)
  shutil.rmtree(tmp_path / 'checkpoint_2')  # as if it had been interrupted after its first step
  assert (tmp_path / 'checkpoint_1').exists()
  before = hits()
  assert any((tmp_path / compilation_cache.FOLDER).iterdir())
  assert jax.config.jax_compilation_cache_dir is None
  step, resumed = toy_run.run(tmp_path, total_steps=2, **settings)
  assert step == 2 and hits() > before
  jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


@pytest.mark.usefixtures('no_cache')
def test_programs_of_another_user_are_not_read(tmp_path, monkeypatch, caplog):
  with compilation_cache.in_directory(epath.Path(tmp_path)):
    jax.jit(lambda x: x + 1)(np.ones(3)).block_until_ready()
  programs = {*(tmp_path / compilation_cache.FOLDER).iterdir()}
  assert programs
  real = os.stat

  def stat(path, *args, **kwargs):
    found = real(path, *args, **kwargs)
    another = os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))
    return another if os.fspath(path) == str(min(programs)) else found

  monkeypatch.setattr(os, 'stat', stat)
  with compilation_cache.in_directory(epath.Path(tmp_path)):
    jax.jit(lambda x: x + 2)(np.ones(3)).block_until_ready()
  assert {*(tmp_path / compilation_cache.FOLDER).iterdir()} == programs
  assert str(min(programs)) in caplog.text
