import errno
import functools
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from clu import metrics as clu_metrics
from flax import traverse_util

from het_plugin import data
from het_plugin.config import changes
from het_plugin.operations import attempts, goodput, heartbeat, operations, run_status
from het_plugin.system import exit_codes, run_files, stopping
from het_plugin.training import (
  actions,
  checkpoint_reader,
  checkpoints,
  class_names,
  loop,
  observer,
  optimizers,
  partitioning,
)
from het_plugin.training import step as step_lib
from launch import soak
from tests.training import faulty_run, toy, toy_run
from tests.training.toy_run import assert_equal, lines, series
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]


class Interrupt(actions.BaseAction):
  """Calls a function."""

  def __init__(self, how):
    self._how = how

  def run(self, train_state, metrics_by_task):
    self._how()
    return False


def sigterm():
  """Sends SIGTERM to this process, and returns when it is noticed."""
  os.kill(os.getpid(), signal.SIGTERM)
  wait_for(stopping.requested)


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  """(directory, final state) of a run nothing happens to; two of its records are unreadable."""

  def get_dataset(cfg, rows):
    iterator = toy.get_dataset(cfg, rows)
    if cfg.mixture_or_task_name == 'toy':
      iterator.corrupt_records = ('a.jpg', 'b.jpg')
    return iterator

  directory = tmp_path_factory.mktemp('uninterrupted')
  step, state = toy_run.run(directory, get_dataset_fn=get_dataset)
  assert step == int(state.step) == 12
  return directory, state


@pytest.mark.slow
def test_it_learns_and_writes(tmp_path, caplog):
  caplog.set_level(logging.INFO, 'het_plugin')
  toy_run.run(
    tmp_path,
    total_steps=60,
    eval_period=30,
    stats_period=20,
    infer_eval_dataset_cfg=toy.ToyDatasetConfig(8, 'toy_infer', num_examples=30),
  )
  lines = [message for message in caplog.messages if message.startswith('step ')]
  assert lines[0].startswith('step 1/60 (2%)  loss ')  # not only after the first period
  loss = series(tmp_path, 'train/loss')
  assert list(loss) == [20, 40, 60]
  assert loss[60] < 0.8 * loss[20]
  assert list(series(tmp_path, 'training_eval/toy_eval/loss')) == [30, 60]
  assert list(series(tmp_path, 'infer_eval/toy_infer/precision_at_1')) == [30, 60]
  assert all(value > 0 for value in series(tmp_path, 'train/timing/examples_per_second').values())
  assert any(path.name.startswith('events.out') for path in tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(('learning_rate', 'said'), [(1e-2, True), (0.0, False)])
def test_a_temperature_that_stays_near_its_start_is_told(tmp_path, caplog, learning_rate, said):
  """Also after an interruption: the checkpoint has where it began."""
  caplog.set_level(logging.INFO, 'het_plugin')

  class TauModel(toy.ToyModel):
    def _loss(self, params, batch, noise):
      loss, metrics = super()._loss(params, batch, noise)
      tau = 1.0 + jax.nn.sigmoid(params['temperature'])
      return loss, metrics | {'tau': clu_metrics.LastValue.from_model_output(tau[None])}

  model = TauModel(optimizer_def=optimizers.adamw(learning_rate, weight_decay=0.0))
  with pytest.raises(exit_codes.Preempted):
    interrupt = {'TRAIN_EVAL': [Interrupt(sigterm)]}
    toy_run.run(tmp_path, model=model, eval_period=3, actions=interrupt)
  toy_run.run(tmp_path, model=model)
  found = [message for message in caplog.messages if message.startswith('tau ends at ')]
  assert len(found) == said and all('10% of its start, 1.500' in message for message in found)


@pytest.mark.parametrize(
  ('tau', 'said'), [(1.36, True), (1.34, False), (1.64, True), (1.66, False)]
)
def test_a_temperature_is_near_its_start_within_a_tenth(caplog, tau, said):
  caplog.set_level(logging.INFO, 'het_plugin')
  loop.TrainLoop._say_if_tau_stayed(types.SimpleNamespace(first_tau=1.5), tau)
  assert any('within 10% of its start, 1.500' in message for message in caplog.messages) == said


def test_where_it_stands_is_told(uninterrupted):
  directory, _ = uninterrupted
  facts = run_status.read(directory)
  assert (facts['state'], facts['step'], facts['total_steps']) == ('done', 12, 12)
  assert facts['checkpoint']['step'] == facts['attempts'][0]['saved_step'] == 12
  assert 0 < facts['checkpoint']['bytes'] < 1e6 and facts['checkpoint']['age_seconds'] < 3600
  assert facts['metrics']['loss'] == series(directory, 'train/loss')[12]
  assert {'gradient_norm', 'param_norm', 'examples_per_second', 'data_wait_share'} <= set(
    facts['metrics']
  )
  assert facts['metrics']['compile_seconds'] > 0
  assert list(series(directory, 'train/timing/save_seconds')) == [4, 8, 12]
  assert set(series(directory, 'data/corrupt_records').values()) == {2}
  assert facts['corrupt_records'] == 2
  seconds = facts['goodput']['seconds']
  assert all(
    seconds[p] > 0 for p in ('training', 'start', 'initialise', 'compile', 'evaluate', 'save')
  )
  assert series(directory, 'goodput/share')[12] == pytest.approx(facts['goodput']['share'], rel=0.2)


def test_evaluation_leaves_padding_rows_out(uninterrupted):
  """20 examples in two batches of 16: the mean over exactly these."""
  directory, state = uninterrupted
  batch = toy.make_batch(np.arange(20), np.ones(20, bool))
  loss, _ = jax.jit(toy.ToyModel().eval_fn)(jax.device_get(state.params), batch)
  written = series(directory, 'training_eval/toy_eval/loss')[12]
  np.testing.assert_allclose(written, loss, rtol=1e-5)


def test_sigterm_saves_and_a_relaunch_goes_on_as_if_nothing_had_happened(tmp_path, uninterrupted):
  """SIGTERM at step 6, off the checkpoint period of 4, with an evaluation due."""

  class Signal(actions.BaseAction):
    def run(self, train_state, metrics_by_task):
      if int(train_state.step) == 6:
        os.kill(os.getpid(), signal.SIGTERM)
      return False

  seen = tmp_path / 'seen.txt'
  recording = {'trainer_cls': toy_run.recording_trainer(seen)}
  with pytest.raises(exit_codes.Preempted) as preempted:
    toy_run.run(tmp_path, actions={'TRAIN': [Signal()]}, **recording)
  assert preempted.value.code == exit_codes.PREEMPTED == 42
  assert (tmp_path / 'checkpoint_6').exists()
  assert 'training_eval/toy_eval/loss' not in lines(tmp_path)[-1]

  assert len(seen.read_text().split()) == 6 * 16
  step, state = toy_run.run(tmp_path, **recording)

  directory, want = uninterrupted
  assert step == 12
  assert_equal(state.params, want.params)
  assert_equal(jax.tree.leaves(state.opt_state), jax.tree.leaves(want.opt_state))
  assert [int(i) for i in seen.read_text().split()] == list(range(12 * 16))
  for name in ('train/loss', 'train/gradient_norm', 'training_eval/toy_eval/loss'):
    assert series(tmp_path, name) == series(directory, name)
    assert len([row for row in lines(tmp_path) if name in row]) == len(series(tmp_path, name))


@pytest.mark.slow
def test_factored_moments_are_saved_and_resumed(tmp_path):
  optimizer = optimizers.adamw(1e-2, factored_params='^head_kernel$')
  settings = {'model': toy.ToyModel(optimizer_def=optimizer)}
  _, want = toy_run.run(tmp_path / 'whole', **settings)
  toy_run.run(tmp_path / 'parts', total_steps=8, **settings)
  step, state = toy_run.run(tmp_path / 'parts', **settings)
  assert step == 12
  assert_equal(state.params, want.params)
  assert_equal(jax.tree.leaves(state.opt_state), jax.tree.leaves(want.opt_state))
  loss = series(tmp_path / 'parts', 'train/loss')
  assert loss[12] < loss[1]


@pytest.mark.slow
def test_interruptions_inside_a_period_of_statistics_leave_no_trace_in_the_metrics(tmp_path):
  """A crash after the checkpoint of step 4, then SIGTERM in step 7; summaries at 5, 10 and 12."""

  def crash():
    raise SystemExit  # as if killed: a failed evaluation would be saved

  def run(folder, how=lambda: None):
    interrupting = {'TRAIN_EVAL': [Interrupt(how)]}
    toy_run.run(tmp_path / folder, stats_period=5, actions=interrupting)

  run('whole')
  for how, error in ((crash, SystemExit), (sigterm, exit_codes.Preempted)):
    with pytest.raises(error):
      run('interrupted', how)
  assert checkpoint_reader.steps(tmp_path / 'interrupted') == [4, 7]
  run('interrupted')
  want, got = (soak.metric_lines(tmp_path / x / 'metrics.jsonl') for x in ('whole', 'interrupted'))
  assert got == want
  assert list(series(tmp_path / 'interrupted', 'train/loss')) == [5, 10, 12]


def run_two(module, *arguments):
  """(exit codes, last lines on stderr) of 2 processes of 4 devices."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  env = os.environ | {'XLA_FLAGS': os.environ['XLA_FLAGS'].replace('count=8', 'count=4')}
  command = [sys.executable, '-m', module, *map(str, arguments), address]
  logs = [tempfile.TemporaryFile('w+') for _ in range(2)]
  processes = [
    subprocess.Popen([*command, str(i)], cwd=ROOT, env=env, stderr=log)
    for i, log in enumerate(logs)
  ]
  try:
    codes = [process.wait(timeout=300) for process in processes]
  finally:
    for process in processes:
      process.kill()
    texts = []
    for log in logs:
      log.seek(0)
      texts.append(log.read())
      print(texts[-1])  # pytest shows it if the test fails
  return codes, [text.splitlines()[-1] for text in texts]


def test_a_crash_goes_back_to_the_last_intact_checkpoint_without_repeating_lines(
  tmp_path, uninterrupted, caplog
):
  """To checkpoint 4, because checkpoint 8 is damaged."""

  class Crash(actions.BaseAction):
    def run(self, train_state, metrics_by_task):
      if int(train_state.step) == 9:
        raise RuntimeError('crash')
      return False

  with pytest.raises(RuntimeError, match='crash'):
    toy_run.run(tmp_path, actions={'TRAIN': [Crash()]})
  assert lines(tmp_path)[-1]['step'] == 9
  for path in (tmp_path / 'checkpoint_8' / 'state').rglob('d/*'):
    os.truncate(path, path.stat().st_size // 2)
  _, state = toy_run.run(tmp_path)
  assert 'Skipping' in caplog.text and 'checkpoint_8' in caplog.text
  assert (tmp_path / 'unreadable_checkpoint_8').exists()
  assert_equal(state.params, uninterrupted[1].params)
  assert_equal(jax.tree.leaves(state.opt_state), jax.tree.leaves(uninterrupted[1].opt_state))
  for name in ('train/loss', 'training_eval/toy_eval/loss'):
    assert series(tmp_path, name) == series(uninterrupted[0], name)
  assert len([row for row in lines(tmp_path) if 'train/loss' in row]) == 12

  crashed, resumed = attempts.read_attempts(tmp_path).values()
  assert (crashed.start_step, crashed.step, crashed.saved_step) == (0, 9, 8)
  assert (crashed.state, crashed.message) == ('failed', 'RuntimeError: crash')
  assert (resumed.start_step, resumed.step, resumed.state) == (4, 12, 'done')
  assert goodput.goodput([crashed, resumed])['repeated_steps'] == 5
  log = lines(tmp_path / 'logs/process-00000.jsonl')
  error = [line for line in log if line['level'] == 'ERROR'][0]
  assert error['step'] == 9 and 'RuntimeError: crash' in error['exception']


@pytest.fixture(scope='module')
def two_processes(tmp_path_factory):
  """(directory, exit codes, last lines) of two processes that go on with a run of 8 steps."""
  directory = tmp_path_factory.mktemp('two_processes')
  toy_run.run(directory, total_steps=8)
  return directory, *run_two('tests.training.faulty_run', directory)


@pytest.mark.slow
def test_processes_wait_for_one_that_compiles_longer(two_processes):
  """Process 0 runs a program for both only when process 1 has compiled it, too."""
  directory, *_ = two_processes
  first, second = (json.loads((directory / f'late_{i}.json').read_text()) for i in range(2))
  assert first['mean'] == second['mean'] == 3.5
  assert first['run'] >= second['compiled']


@pytest.mark.slow
def test_one_process_that_cannot_read_or_write_stops_no_other(two_processes, uninterrupted):
  """Process 1 cannot read checkpoint 8, so both pass over it; nor save it again: both end."""
  directory, codes, last_lines = two_processes
  # One may be in a step that the other does not begin; it ends when it has lost the other.
  assert 1 in codes and set(codes) <= {1, exit_codes.LOST, -signal.SIGABRT}
  reasons = (
    '_PeerFailed: another process has failed',
    'OSError: [Errno 28] No space left on device',
  )
  for code, line, reason in zip(codes, last_lines, reasons, strict=True):
    sentence = (
      f'Error: the checkpoint of step 8 cannot be written ({reason}); the newest complete one is '
      f'{directory}/checkpoint_4, from which the same command resumes.'
    )
    assert code != 1 or line == sentence
  assert (directory / 'unreadable_checkpoint_8').exists()
  _, state = toy_run.run(directory)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, uninterrupted[1].params
  )


def test_a_full_disk_ends_the_run_soon_and_it_goes_on(tmp_path, uninterrupted, monkeypatch):
  """The checkpoint of step 8 fails in the background; the metrics cannot be written."""
  steps = []

  def fail(path, text):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))

  class FillDisk(actions.BaseAction):
    def run(self, train_state, metrics_by_task):
      steps.append(int(train_state.step))
      if steps[-1] == 5:
        faulty_run.fill_disk(monkeypatch.setattr)
      if steps[-1] == 9:
        monkeypatch.setattr(run_files, 'append_text', fail)
      if steps[-1] > 8:
        assert faulty_run.FullDisk.met.wait(300)
        time.sleep(0.5)

  with pytest.raises(checkpoints.SaveFailed, match='step 8 .* No space left .*checkpoint_4,'):
    toy_run.run(tmp_path, actions={'TRAIN': [FillDisk()]})
  assert steps[-1] < 12  # not only when the next one is due
  monkeypatch.undo()
  _, state = toy_run.run(tmp_path)
  assert_equal(state.params, uninterrupted[1].params)
  assert series(tmp_path, 'train/loss') == series(uninterrupted[0], 'train/loss')


@pytest.mark.slow
@pytest.mark.parametrize('num_devices, num_partitions', [(8, 8), (6, 2)])
def test_resuming_on_another_mesh(num_devices, num_partitions, tmp_path, uninterrupted):
  """After four steps on 4 x 2 devices, with one row of them, or with 3 x 2, which do not divide a
  batch of 16.
  """
  directory, want = uninterrupted
  shutil.copytree(directory / 'checkpoint_4', tmp_path / 'checkpoint_4')
  mesh = partitioning.PjitPartitioner(num_partitions, devices=jax.devices()[:num_devices])
  microbatches = 2 if num_partitions == 8 else None
  trainer = functools.partial(step_lib.Trainer, num_microbatches=microbatches)
  _, got = toy_run.run(tmp_path, partitioner=mesh, trainer_cls=trainer)
  for name in ('train/loss', 'training_eval/toy_eval/loss'):
    expected = {step: x for step, x in series(directory, name).items() if step > 4}
    assert series(tmp_path, name) == pytest.approx(expected, abs=1e-4)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got.params, want.params)


@pytest.mark.slow
def test_an_epoch_resumed_before_its_last_batch_has_every_example_once(tmp_path):
  """Of the last of three batches, 8 of 16 rows are real."""
  digits = {'image': 8, 'label': 1}
  for total_steps in (2, 3):
    toy_run.run(
      tmp_path,
      train_dataset_cfg=data.DatasetConfig('digits', digits, 'train[:40]', 16, num_epochs=1),
      train_eval_dataset_cfg=None,
      get_dataset_fn=data.get_dataset,
      trainer_cls=toy_run.recording_trainer(tmp_path / 'seen.txt'),
      total_steps=total_steps,
    )
  seen = [int(index) for index in (tmp_path / 'seen.txt').read_text().split()]
  assert seen != sorted(seen) == list(range(40))


def test_early_stopping_goes_on_where_it_was(tmp_path):
  def run(total_steps):
    stopping = actions.EarlyStoppingAction(('toy_eval', 'loss'), 'max', patience=3)
    period = {'eval_period': 2, 'total_steps': total_steps}
    return toy_run.run(tmp_path, actions={'TRAIN_EVAL': [stopping]}, **period)[0]

  assert run(total_steps=4) == 4  # two evaluations; the second is worse
  assert run(total_steps=12) == 6
  assert run(total_steps=12) == 6  # a restart trains no further
  assert list(series(tmp_path, 'goodput/share')) == [4, 6]


@pytest.mark.parametrize('first', [math.inf, math.nan])
def test_early_stopping_takes_a_number_for_better_than_none(first):
  stopping = actions.EarlyStoppingAction(('toy_eval', 'loss'), 'min', patience=2)
  losses = [first, 2.0, 1.0, math.inf, 1.0, 1.0]
  stopped = [stopping.run(None, {'toy_eval': {'loss': loss}}) for loss in losses]
  assert stopped == [False, False, False, True, False, True]


def test_an_evaluation_that_is_repeated_counts_once(tmp_path):
  def run(*more):
    stopping = actions.EarlyStoppingAction(('toy_eval', 'loss'), 'min', patience=2)
    infer = toy.ToyDatasetConfig(16, 'toy_infer', num_examples=40)
    settings = {'actions': {'TRAIN_EVAL': [stopping, *more]}, 'infer_eval_dataset_cfg': infer}
    return toy_run.run(tmp_path, **settings)[0]

  with pytest.raises(exit_codes.Preempted):
    run(Interrupt(sigterm))  # noticed in infer-eval
  assert run() == 12


def test_an_evaluation_that_fails_loses_no_steps(tmp_path):
  def fail():
    raise RuntimeError('my action')

  stopping = actions.EarlyStoppingAction(('toy_eval', 'loss'), 'min', patience=2)
  with pytest.raises(RuntimeError, match='my action'):
    toy_run.run(tmp_path, actions={'TRAIN_EVAL': [stopping, Interrupt(fail)]})
  assert (tmp_path / 'checkpoint_6').exists()
  # It evaluates again, which counts once.
  assert toy_run.run(tmp_path, actions={'TRAIN_EVAL': [stopping]})[0] == 12


def test_the_last_step_ends_a_period_also_of_a_run_that_only_trains(tmp_path):
  nothing = {'checkpoint_cfg': checkpoints.CheckpointConfig(), 'train_eval_dataset_cfg': None}
  toy_run.run(tmp_path, total_steps=5, stats_period=4, **nothing)
  assert list(series(tmp_path, 'train/loss')) == [4, 5]


def test_a_finished_run_does_nothing(tmp_path):
  _, first = toy_run.run(tmp_path, total_steps=4)
  before = lines(tmp_path)
  step, again = toy_run.run(tmp_path, total_steps=4)
  assert step == 4
  assert_equal(first.params, again.params)
  assert lines(tmp_path) == before
  with pytest.raises(ValueError, match='total_steps=3 .* 4'):
    toy_run.run(tmp_path, total_steps=3)


def test_a_run_that_ends_earlier_than_planned_is_evaluated(tmp_path):
  with pytest.raises(exit_codes.Preempted):
    toy_run.run(tmp_path, actions={'TRAIN': [Interrupt(sigterm)]})
  assert toy_run.run(tmp_path, total_steps=1)[0] == 1
  assert list(series(tmp_path, 'training_eval/toy_eval/loss')) == [1]


def test_a_checkpoint_of_another_run_that_came_while_it_waited_is_not_resumed(
  tmp_path, uninterrupted
):
  class Waits(observer.Observer):  # for another training, which ends meanwhile
    def begin(self):
      shutil.copytree(uninterrupted[0], tmp_path, dirs_exist_ok=True)

  config = changes.RunConfig('adamw.learning_rate = 0.2')
  with pytest.raises(ValueError, match='different configuration .*learning_rate'):
    toy_run.run(tmp_path, config=config, observer=Waits())


def test_a_run_does_not_go_on_with_other_data_under_the_same_name(tmp_path, caplog):
  model = toy.ToyModel()
  model.validate = lambda info: None
  half = toy.ToyDatasetConfig(16, split='train[:50%]')

  def run(size, version, accept=False):
    info = types.SimpleNamespace(splits={'train': size}, version=version)
    config = changes.RunConfig('A = 1', accept)
    toy_run.run(
      tmp_path,
      model=model,
      total_steps=2,
      config=config,
      train_dataset_cfg=half,
      task_info_fn=lambda task: info,
    )

  run(100, 'a')
  run(100, 'a')
  with pytest.raises(ValueError, match='other data .*the version of the training data changed'):
    run(100, 'b')
  assert 'may change the results of this run changed since step 2: the version' in caplog.text
  assert "'a' -> 'b'" in caplog.text
  with pytest.raises(ValueError, match='other data .*the number of training examples changed'):
    run(98, 'a')
  run(98, 'b', accept=True)
  assert not list(tmp_path.glob('config_until_*'))


def test_the_classes_of_a_run_keep_their_numbers(tmp_path, caplog):
  model = toy.ToyModel()
  model.validate = lambda info: None

  def run(*names):
    info = types.SimpleNamespace(class_names=names)
    toy_run.run(tmp_path, model=model, total_steps=2, task_info_fn=lambda task: info)

  run('ant', 'bee')
  assert class_names.read(tmp_path) == class_names.read(tmp_path / 'checkpoint_2') == ('ant', 'bee')
  with pytest.raises(ValueError, match="name=toy: 'bee' is class 0 .*class 1 "):
    run('bee', 'ant')
  assert class_names.read(tmp_path) == ('ant', 'bee') and 'class ' not in caplog.text
  run('ant', 'wasp')
  assert re.search("class 1 is 'wasp' .*'bee'", caplog.text)
  assert class_names.read(tmp_path) == ('ant', 'bee')
  with pytest.raises(ValueError, match=r"name=toy: the class name 'b\\ne' has a line break"):
    run('ant', 'b\ne')
  (tmp_path / class_names.FILE).write_text('bee\nant\n')
  for read in (run, lambda *_: class_names.read(tmp_path / 'checkpoint_2')):
    with pytest.raises(
      ValueError, match='names, in their order, that checkpoint_2 was trained with'
    ):
      read('bee', 'ant')


def test_warm_start_takes_parameters_only(tmp_path, uninterrupted):
  directory, want = uninterrupted
  restore = checkpoints.RestoreCheckpointConfig(str(directory))

  class Probe(actions.BaseAction):
    def run(self, train_state, metrics_by_task):
      self.change = metrics_by_task['train']['update_norm']
      return True

  probe = Probe()
  step, state = toy_run.run(
    tmp_path,
    checkpoint_cfg=checkpoints.CheckpointConfig(restore=restore),
    actions={'TRAIN': [probe]},
  )
  assert step == 1
  moved = jax.tree.map(lambda a, b: np.sum((np.asarray(a) - b) ** 2), state.params, want.params)
  np.testing.assert_allclose(np.sqrt(sum(jax.tree.leaves(moved))), probe.change, rtol=1e-3)
  assert int(state.opt_state[1][0].count) == 1


def test_a_head_that_starts_afresh_is_not_that_of_the_run_with_the_same_seed(tmp_path):
  directory = tmp_path / 'first'
  _, first = toy_run.run(directory, total_steps=1)
  restore = checkpoints.RestoreCheckpointConfig(
    str(directory), assignment_map=(('head_kernel', None),), fallback_to_scratch=True
  )
  cfg = checkpoints.CheckpointConfig(restore=restore)
  _, second = toy_run.run(tmp_path / 'second', total_steps=1, checkpoint_cfg=cfg)
  for name, low, high in (('hidden_kernel', 0.95, 1.0), ('head_kernel', -0.3, 0.3)):
    pair = np.ravel(first.params[name]), np.ravel(second.params[name])
    assert low < np.corrcoef(*pair)[0, 1] < high


@pytest.mark.slow
def test_the_average_of_the_parameters_is_evaluated_saved_and_resumed(tmp_path, uninterrupted):
  def model(evaluate=True):
    averaged = optimizers.with_ema(toy.ToyModel().optimizer_def, 0.9, evaluate)
    return toy.ToyModel(optimizer_def=averaged)

  _, want = toy_run.run(tmp_path / 'a', model=model())
  average = optimizers.ema_params(want.opt_state)
  kernel = average['head_kernel']  # classes are split over the model axis, as the parameter is
  assert kernel.sharding == want.params['head_kernel'].sharding
  assert not kernel.sharding.is_fully_replicated
  # Interrupted, and gone on with the parameters themselves evaluated.
  toy_run.run(tmp_path / 'b', model=model(), total_steps=8)
  _, got = toy_run.run(tmp_path / 'b', model=model(evaluate=False))
  assert_equal((got.params, got.opt_state), (want.params, want.opt_state))
  name = 'training_eval/toy_eval/loss'
  averaged, plain = (series(tmp_path / run, name) for run in 'ab')
  assert averaged[6] == plain[6] and averaged[12] != plain[12]

  read = checkpoint_reader.read_params(tmp_path / 'a', ema=True)
  assert_equal(read, traverse_util.flatten_dict(average, sep='/'))
  with pytest.raises(ValueError, match='with_ema'):
    checkpoint_reader.read_params(uninterrupted[0], ema=True)
  # A warm start takes it, and its own average begins there.
  restore = checkpoints.RestoreCheckpointConfig(str(tmp_path / 'a'), ema=True)
  start = checkpoints.CheckpointConfig(restore=restore)
  _, warm = toy_run.run(tmp_path / 'e', model=model(), checkpoint_cfg=start, total_steps=1)
  assert_equal(optimizers.ema_params(warm.opt_state), warm.params)
  assert np.abs(np.asarray(warm.params['head_kernel']) - kernel).max() < 0.02


class Stop(actions.BaseAction):
  """Stops at once and notes what it was given."""

  def setup(self, context):
    self.context = context

  def run(self, train_state, metrics_by_task):
    self.seen = metrics_by_task
    self.context.writer.write_scalars(int(train_state.step), {'stop/seen': 1.0})
    return True


def test_an_action_stops_the_run_which_is_saved(tmp_path):
  action = Stop()
  last, _ = toy_run.run(
    tmp_path,
    actions={'INFER_EVAL': [action]},
    infer_eval_dataset_cfg=toy.ToyDatasetConfig(16, 'toy_infer', num_examples=8),
  )
  assert last == 6
  assert list(action.seen) == ['toy_infer']
  assert isinstance(action.seen['toy_infer']['loss'], float)
  assert (action.context.random_seed, action.context.model_dir) == (toy_run.SEED, str(tmp_path))
  assert series(tmp_path, 'stop/seen') == {6: 1.0}
  assert (tmp_path / 'checkpoint_6').exists()


def test_a_run_that_an_action_of_train_stops_is_evaluated_and_stays_where_it_is(tmp_path):
  for _ in range(2):
    last, state = toy_run.run(tmp_path, actions={'TRAIN': [Stop()]})
    assert (last, int(state.step)) == (1, 1)
  assert list(series(tmp_path, 'training_eval/toy_eval/loss')) == [1]

  toy_run.run(tmp_path, actions={'TRAIN': [Stop()]}, eval_steps=1, evaluate_again=True)
  losses = [row for row in lines(tmp_path) if 'training_eval/toy_eval/loss' in row]
  assert [row['step'] for row in losses] == [1] and lines(tmp_path)[-1]['step'] == 1
  last, _ = toy_run.run(tmp_path, actions={'TRAIN': [Stop()]}, total_steps=13)
  assert last == 2
  last, _ = toy_run.run(tmp_path)
  assert last == 12


@pytest.mark.slow
def test_profiles_of_the_steps_bound_and_on_request(tmp_path, monkeypatch):
  """Asked for at step 2, where training waits for the answer."""
  monkeypatch.setattr(heartbeat, 'PERIOD_SECONDS', 0.01)
  monkeypatch.setattr(operations, '_ALONE_LEAD_SECONDS', 0)
  request = tmp_path / 'profile_request'

  def is_answered():
    try:
      return 'first' in request.read_text()
    except FileNotFoundError:  # and done with
      return True

  class Ask(actions.BaseAction):
    def run(self, train_state, metrics_by_task):
      if int(train_state.step) == 2:
        request.write_text('{"steps": 2}')
      wait_for(is_answered)
      return False

  toy_run.run(tmp_path, actions={'TRAIN': [Ask()]}, profile_steps=(10, 11))
  traces = sorted((tmp_path / 'profile').rglob('*.xplane.pb'))
  assert [path.parent for path in traces] == [
    tmp_path / 'profile' / 'plugins' / 'profile' / f'step_{step}' for step in (10, 3)
  ]
  assert not request.exists()
