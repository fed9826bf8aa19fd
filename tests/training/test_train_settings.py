"""Settings of `train`: checked before data is read and anything is compiled."""

import functools
import re
import types

import pytest

from het_plugin.operations import lock, run_status
from het_plugin.system import run_files
from het_plugin.training import actions, checkpoints
from tests.training import toy, toy_run


class Config:
  """A configuration that is refused when it is checked for the second time."""

  text = 'A = 1'

  def __init__(self):
    self.seen = []
    self.written = []

  def check(self, step, record, model_dir, data):
    self.seen.append((step, record['config']))
    if len(self.seen) == 2:
      raise ValueError('another run')

  def write(self, model_dir, step):
    self.written.append((model_dir, step))


def test_a_configuration_is_checked_before_data_and_compiler(tmp_path):
  config = Config()
  settings = {'total_steps': 4, 'config': config}
  toy_run.run(tmp_path, **settings)
  assert not config.seen and config.written == [(str(tmp_path), 0)]
  toy_run.run(tmp_path, **settings)
  before = toy_run.lines(tmp_path)
  with pytest.raises(ValueError, match='another run'):
    toy_run.run(tmp_path, **settings, get_dataset_fn=lambda *args: pytest.fail('read data'))
  assert config.seen == [(4, 'A = 1')] * 2
  assert len(config.written) == 2 and toy_run.lines(tmp_path) == before


def test_the_model_sees_the_task_in_the_vocabulary_of_the_data_set(tmp_path):
  """A text tower's embedding has a row for each token id."""

  def refuse(info):
    raise ValueError(f'no embedding for {info}')

  model = toy.ToyModel()
  cfg = toy.ToyDatasetConfig(16)
  model.validate = refuse
  object.__setattr__(cfg, 'vocabulary', 'words.model')
  with pytest.raises(ValueError, match=r"\('toy', 'words.model'\)"):
    toy_run.run(
      tmp_path, model=model, train_dataset_cfg=cfg, task_info_fn=lambda *arguments: arguments
    )


def test_all_data_sets_of_a_run_number_the_classes_as_the_first(tmp_path):
  names = {'toy': ('ant', 'bee', 'cat'), 'other': ('bee', 'ant', 'cat')}
  model = toy.ToyModel()
  other = toy.ToyDatasetConfig(16, 'other')
  model.validate = lambda info: None
  with pytest.raises(ValueError, match="name=other: 'bee' is class 0 here and class 1 in the tr"):
    toy_run.run(
      tmp_path,
      model=model,
      task_info_fn=lambda task: types.SimpleNamespace(class_names=names.get(task)),
      train_eval_dataset_cfg=other,
    )


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'total_steps': 0}, 'total_steps=0 .*1'),
    ({'train_dataset_cfg': toy.ToyDatasetConfig(18)}, 'batch_size=18'),
    (
      {'trainer_cls': functools.partial(toy_run.Trainer, num_microbatches=8)},
      'batch_size=16 .*32',
    ),
    ({'model': toy.ToyModel(toy.Mlp(num_classes=15))}, 'head_bias of shape'),
    ({'actions': {'EVAL': []}}, "'EVAL'"),
    (
      {'actions': {'INFER_EVAL': [actions.TerminateOnNanAction()]}},
      'TerminateOnNanAction for INFER_EVAL, but train.infer_eval_dataset_cfg is None',
    ),
    ({'infer_eval_dataset_cfg': toy.ToyDatasetConfig(16, 'endless')}, "'endless' "),
    ({'train_eval_dataset_cfg': toy.ToyDatasetConfig(16, 'empty', 0)}, "'empty' .*no batch"),
  ],
)
def test_bad_settings_are_named_before_anything_is_compiled(tmp_path, monkeypatch, settings, words):
  monkeypatch.setattr(toy_run.Trainer, 'compile_train', lambda *args: pytest.fail('compiled'))
  monkeypatch.setattr(checkpoints, 'Checkpointer', lambda *args: pytest.fail('opened model_dir'))
  with pytest.raises(ValueError, match=words):
    toy_run.run(tmp_path, **settings)
  assert not list(tmp_path.iterdir())


class UntraceableModel(toy.ToyModel):
  """Refuses its loss or its evaluation when it is traced, as an integrator does."""

  def __init__(self, method):
    super().__init__()
    self._refused = method

  def loss_fn(self, *args):
    return self._unless_refused('loss_fn', *args)

  def eval_fn(self, *args):
    return self._unless_refused('eval_fn', *args)

  def _unless_refused(self, method, *args):
    if method == self._refused:
      raise ValueError(f'{method} needs a sigmoid')
    return getattr(super(), method)(*args)


@pytest.mark.parametrize('method', ['loss_fn', 'eval_fn'])
def test_a_model_that_cannot_be_traced_leaves_no_file(tmp_path, method):
  with pytest.raises(ValueError, match=f'{method} needs a sigmoid'):
    toy_run.run(tmp_path / 'run', model=UntraceableModel(method))
  assert not (tmp_path / 'run').exists()


def test_a_refused_start_of_a_run_changes_nothing_of_it(tmp_path):
  config = Config()
  toy_run.run(tmp_path, total_steps=4, config=config)

  def content():
    kept = [p for p in tmp_path.rglob('*') if p.is_file() and p.parent.name != 'logs']
    return {path: path.read_bytes() for path in kept if path.name != lock.NAME}

  before = content()
  wider = toy.ToyModel(toy.Mlp(width=64))
  unknown = {'TRAIN': [actions.TerminateOnNanAction('test')]}
  of_train = {'TRAIN_EVAL': [actions.TerminateOnNanAction()]}  # which has metrics of toy_eval only
  refused = {'model': wider}, {'actions': unknown}, {'actions': of_train}, {'total_steps': 3}
  for settings in refused:
    with pytest.raises(ValueError, match='shape|TerminateOnNanAction.task|total_steps=3'):
      toy_run.run(tmp_path, **settings)
    assert content() == before
  assert run_status.read(tmp_path)['state'] == 'done' and len(config.written) == 1


def test_a_training_set_that_is_too_short_is_named_before_anything_is_compiled(
  tmp_path, monkeypatch
):
  toy_run.run(
    tmp_path / 'half', train_dataset_cfg=toy.ToyDatasetConfig(16, num_examples=60), total_steps=4
  )
  monkeypatch.setattr(toy_run.Trainer, 'compile_train', lambda *args: pytest.fail('compiled'))
  short = toy.ToyDatasetConfig(16, num_examples=100)  # 7 batches
  with pytest.raises(ValueError, match='total_steps=12 .* 7: .*step 0'):
    toy_run.run(tmp_path / 'new', train_dataset_cfg=short)
  with pytest.raises(ValueError, match='total_steps=12 .* 7: .*step 4 .* 3 batches of 16'):
    toy_run.run(tmp_path / 'half', train_dataset_cfg=short)
  larger = toy.ToyDatasetConfig(24, num_examples=100)  # from example 64 on
  with pytest.raises(ValueError, match='total_steps=7 .* 6: .*step 4 .* 2 batches of 24'):
    toy_run.run(tmp_path / 'half', train_dataset_cfg=larger, total_steps=7)


def test_a_run_has_a_folder(tmp_path):
  with pytest.raises(ValueError, match='model_dir=~/run: '):
    toy_run.run('~/run')
  (tmp_path / 'file').touch()
  with pytest.raises(ValueError, match='model_dir=.*/file is a file: give a folder'):
    toy_run.run(tmp_path / 'file')


@pytest.mark.parametrize('name', ['lock', 'metrics.jsonl', 'logs', 'checkpoint_4/state'])
def test_links_that_lead_out_of_the_folder_are_refused_before_anything_is_opened(tmp_path, name):
  """A folder of another person may hold them. Links inside it, and one to it, are followed."""
  other = tmp_path / 'other'
  other.write_text('mine')
  run = tmp_path / 'run'
  link = run / name
  link.parent.mkdir(parents=True)
  link.symlink_to('../' * len(link.relative_to(run).parts) + 'other')
  (tmp_path / 'alias').symlink_to(run)
  message = f'run/{name} is a link to {re.escape(str(other))}, outside'
  with pytest.raises(ValueError, match=message):
    toy_run.run(tmp_path / 'alias')
  assert other.read_text() == 'mine' and list(link.parent.iterdir()) == [link]
  link.unlink()
  link.symlink_to(run / 'inside')
  run_files.check_links(tmp_path / 'alias')


def test_a_file_is_replaced_whatever_lies_where_it_is_begun(tmp_path):
  (tmp_path / 'other').write_text('mine')
  (tmp_path / '.unfinished.a.csv').symlink_to('other')
  run_files.write_text(tmp_path / 'a.csv', 'new')
  assert (tmp_path / 'a.csv').read_text() == 'new' and not (tmp_path / 'a.csv').is_symlink()
  assert (tmp_path / 'other').read_text() == 'mine'


def test_a_bucket_that_is_mounted_is_named(tmp_path):
  mounts = tmp_path / 'mounts'
  folder = tmp_path / 'my bucket'
  lines = [
    'overlay / overlay rw 0 0',
    f'birds {str(folder).replace(" ", chr(92) + "040")} fuse.gcsfuse rw 0 0',
    f'tmpfs {str(folder).replace(" ", chr(92) + "040")}/local tmpfs rw 0 0',
  ]
  mounts.write_text('\n'.join(lines))
  for path, bucket in (
    (folder / 'runs' / 'x', 'birds'),
    (folder, 'birds'),
    (folder / 'local' / 'x', None),
    (tmp_path / 'my bucket 2', None),
    ('gs://birds/x', None),
  ):
    assert run_files.mounted_bucket(path, str(mounts)) == bucket
  assert run_files.mounted_bucket(folder, str(tmp_path / 'none')) is None
