"""The gin files: every run with every head, use from elsewhere, errors in one sentence."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import gin
from het_plugin import data, heads, models
from het_plugin.cli import command_line
from het_plugin.commands import evaluate, status, train
from het_plugin.config import parsing
from het_plugin.evaluation import actions, prompts
from het_plugin.system import exit_codes
from het_plugin.training import train as train_lib

ROOT = pathlib.Path(__file__).parents[2]
GIN = ROOT / 'gin'
FRAMES = ('train.gin',)
ALL_RUNS = sorted(path.name for path in (GIN / 'runs').glob('*.gin') if path.name not in FRAMES)
CONTRASTIVE_RUNS = [name for name in ALL_RUNS if name.startswith('lit_')]
RUNS = [name for name in ALL_RUNS if name not in CONTRASTIVE_RUNS]
HEADS = {
  'det': heads.Det,
  'det_learned_tau': heads.Det,
  'het': heads.Het,
  'het_h': heads.HetH,
  'het_xl': heads.HetXL,
}
CONTRASTIVE_HEADS = {
  'contrastive_det': heads.ContrastiveDet,
  'contrastive_het_xl': heads.ContrastiveHetXL,
}
RUN = ['het_plugin/gin/runs/digits_smoke.gin', 'het_plugin/gin/heads/het_xl.gin']
OWN = [
  "MIXTURE_OR_TASK_NAME = 'digits'",
  'NUM_CLASSES = 10',
  'IMAGE_SIZE = 32',
  'TRAIN_STEPS = 60000',
]


NEED_DATA = ('own_images', 'jft300m', 'jft4b', 'imagenet21k')
BACKBONE = 'het_plugin/gin/models/vit_ti_16.gin'


@pytest.fixture(scope='module')
def features(tmp_path_factory):
  """Bindings of a task of features."""
  file = tmp_path_factory.mktemp('features') / 'x.npz'
  np.savez(file, features=np.ones((40, 5), np.float32), label=np.arange(40) % 10)
  return [f"MIXTURE_OR_TASK_NAME = 'features:{file}'", 'NUM_CLASSES = 10']


FEATURE_RUNS = 'features.gin', 'million_classes.gin'


def bindings(run):
  return ["MODEL_DIR = 'unused'", *(OWN if run.startswith(NEED_DATA) else [])]


def make_model():
  return gin.get_configurable(models.ClassificationModel)()


@pytest.mark.parametrize('run', RUNS)
def test_every_run_takes_every_head(run, features):
  needs_backbone = run in ('jft300m.gin', 'jft4b.gin', 'imagenet21k.gin')
  for head, kind in HEADS.items():
    files = [f'het_plugin/gin/runs/{run}', f'het_plugin/gin/heads/{head}.gin']
    own = [*bindings(run), *(features if run in FEATURE_RUNS else [])]
    parsing.parse_config([*files, *([BACKBONE] if needs_backbone else [])], own)
    model = make_model()
    assert type(model.head) is kind
    assert model.head.num_classes == gin.query_parameter('%NUM_CLASSES')
    model.validate(data.task_info(gin.query_parameter('%MIXTURE_OR_TASK_NAME')))
    with gin.unlock_config():
      gin.bind_parameter('train.total_steps', 0)
    with pytest.raises(ValueError, match='total_steps=0'):  # everything else could be built
      gin.get_configurable(train_lib.train)()


@pytest.mark.parametrize('run', CONTRASTIVE_RUNS)
def test_every_contrastive_run_takes_every_contrastive_head(run):
  for head, kind in CONTRASTIVE_HEADS.items():
    files = [f'het_plugin/gin/runs/{run}', f'het_plugin/gin/heads/{head}.gin']
    own = ["MIXTURE_OR_TASK_NAME = 'glyph_names'"] if run.startswith('lit_webli') else []
    parsing.parse_config(files, ["MODEL_DIR = 'unused'", *own])
    settings = gin.get_bindings(train_lib.train)
    assert type(settings['model'].head) is kind
    settings['model'].validate(data.task_info(settings['train_dataset_cfg'].mixture_or_task_name))


PARTS = [
  f'het_plugin/gin/{part}.gin'
  for part in ('runs/train', 'models/classification', 'models/vit_ti_16', 'datasets/digits')
]


@pytest.mark.parametrize('path', sorted(GIN.glob('models/*.gin')), ids=lambda path: path.stem)
def test_models_bind_what_exists(path):
  files = [*PARTS, 'het_plugin/gin/heads/het_xl.gin', str(path)]
  if path.stem != 'contrastive':
    parsing.parse_config(files, ["MODEL_DIR = 'unused'", 'TRAIN_STEPS = 5'])
    make_model()
    return
  files += ['het_plugin/gin/heads/contrastive_det.gin', 'het_plugin/gin/datasets/glyph_names.gin']
  parsing.parse_config(files, ["MODEL_DIR = 'unused'", 'TRAIN_STEPS = 5'])
  gin.get_configurable(models.ContrastiveModel)().validate(data.task_info('glyph_names'))


@pytest.mark.parametrize('path', sorted(GIN.glob('datasets/*.gin')), ids=lambda path: path.stem)
def test_data_sets_bind_what_exists(path, features):
  files = [*PARTS, 'het_plugin/gin/heads/het_xl.gin', str(path)]
  own = features if path.stem == 'features' else []
  parsing.parse_config(files, ["MODEL_DIR = 'unused'", 'TRAIN_STEPS = 5', *own])
  if path.name.startswith(NEED_DATA):
    with pytest.raises(ValueError, match='NUM_CLASSES|num_classes'):
      make_model().validate(data.task_info('digits'))
    return
  info = data.task_info(gin.query_parameter('%MIXTURE_OR_TASK_NAME'))
  if isinstance(info, data.ImageTextInfo):
    assert info.vocab_size == gin.query_parameter('%VOCAB_SIZE')
    with pytest.raises(ValueError, match='captions, no class labels'):
      make_model().validate(info)
  else:
    assert info.num_classes == gin.query_parameter('%NUM_CLASSES')
  assert gin.query_parameter('%EVAL_SPLIT') in info.splits


@pytest.mark.parametrize('length, steps', [('EXAMPLES = 100', 2), ('EPOCHS = 3', 68)])
def test_schedule_and_run_have_the_same_length(length, steps):
  """In epochs of the 1,438 digits, by batches of 64."""
  parsing.parse_config(
    RUN, [f'TRAIN_{length}', 'TRAIN_STEPS = None', 'WARMUP_STEPS = 0', "MODEL_DIR = 'unused'"]
  )
  settings = gin.get_bindings(train_lib.train)
  assert settings['total_steps'] == steps
  learning_rate = settings['model'].optimizer_def.learning_rate_fn
  end = gin.query_parameter('warmup_schedule.end_value')
  assert float(learning_rate(steps)) == pytest.approx(end)
  assert float(learning_rate(steps - 1)) > 1.01 * end


@pytest.mark.parametrize('path', sorted(GIN.glob('partitioning/*.gin')))
def test_partitioning_files_make_a_partitioner(path):
  from het_plugin.training import partitioning

  parsing.parse_config([str(path)], [])
  partitioner = gin.get_configurable(partitioning.PjitPartitioner)()
  assert partitioner.data_shards * partitioner.model_shards == jax.device_count()


def tfds_label(dataset):
  """The label feature of a data set, if TFDS knows its name and version."""
  tfds = pytest.importorskip('tensorflow_datasets')
  return tfds.builder(dataset.task.removeprefix('tfds:')).info.features['label']


def test_the_papers_few_shot_data_sets():
  extra = ['FewShotAction.image_size = 224', 'FewShotAction.channels = 3']
  parsing.parse_config(['het_plugin/gin/evaluation/paper_datasets.gin'], extra)
  gin.get_configurable(actions.FewShotAction)()  # takes its data sets from the file
  datasets = [x.scoped_configurable_fn() for x in gin.query_parameter('%FEWSHOT_DATASETS')]
  splits = {x.name: (x.train_split, x.test_split) for x in datasets}
  standard = dict.fromkeys('birds caltech cars cifar100 dtd pets'.split(), ('train', 'test'))
  assert splits == standard | {
    'col_hist': ('train[:2000]', 'train[2000:]'),
    'imagenet': ('train', 'validation'),
    'uc_merced': ('train[:1000]', 'train[1000:]'),
  }
  assert {x.resize for x in datasets} == {'squash'}
  assert all(tfds_label(x).num_classes > 1 for x in datasets)
  with pytest.raises(ValueError, match=f'{datasets[0].task} is not prepared in .*; run: tfds'):
    data.task_info(datasets[0].task)


def test_the_papers_zero_shot_data_sets(tmp_path):
  names_file = tmp_path / 'imagenet.txt'
  names_file.write_text('\n'.join(f'name {i}' for i in range(1000)))
  parsing.parse_config(
    ['het_plugin/gin/evaluation/zeroshot_paper.gin'],
    ["ZERO_SHOT_TEMPLATES = 'photo'", f"IMAGENET_CLASS_NAMES = '{names_file}'"],
  )
  datasets = gin.get_bindings(actions.ZeroShotAction)['datasets']
  sizes = {'imagenet': 1000, 'cifar100': 100, 'oxford_iiit_pet': 37}
  ours = {'glyphs_heldout': 'test', 'glyphs_core': 'validation'}
  assert {x.name for x in datasets} == sizes.keys() | ours.keys()
  for x in datasets:
    if x.name in ours:
      assert x.split == ours[x.name] and x.split in data.task_info(x.task).splits
    else:
      label = tfds_label(x)
      names = prompts.readable_names(x.task, label.names, x.class_names, label.num_classes)
      assert len(set(names)) == sizes[x.name] and x.templates == 'photo'


def test_a_users_config_elsewhere_binds_a_head_with_one_include(tmp_path, monkeypatch):
  (tmp_path / 'mine.gin').write_text(
    "include 'het_plugin/gin/models/vit_ti_16.gin'\n"
    'NUM_CLASSES = 77\n'
    'HEAD = @Det()\n'
    'Det.num_classes = %NUM_CLASSES\n'
    "include 'het_plugin/gin/models/classification.gin'\n"
    'OPTIMIZER = None\n'
    "include 'het_plugin/gin/heads/het_xl.gin'\n"  # the one line
    'HetXL.num_factors = 15\n'
  )
  monkeypatch.chdir(tmp_path)
  parsing.parse_config(['mine.gin'], [])
  head = make_model().head
  assert isinstance(head, heads.HetXL)
  assert (head.num_classes, head.num_factors) == (77, 15)
  assert isinstance(head.temperature, heads.LearnedTemperature)


@pytest.mark.parametrize(
  'files,extra,words',
  [
    (
      RUN[:1],
      [],
      'HEAD is not set: give a file that binds it, such as --gin_file=gin/heads/het_xl.gin',
    ),
    (RUN, ['NUM_CLASSES = 11'], 'HetXL.num_classes=11 must be the number of classes of the task'),
    (RUN, ['HetXL.class_multiple = 5', 'PjitPartitioner.num_partitions = 4'], 'cannot be split'),
    (RUN, ['TRAIN_STEPS = None'], 'given by nothing; exactly one of steps (TRAIN_STEPS), examples'),
    (RUN, ['X = runs/het'], """text needs quotes: --gin.X="'runs/het'\""""),
    (RUN, ["ACTIONS = {'TRAIN': ["], 'EOF in multi-line statement'),
    (RUN, ['HEAD = HetXL'], 'or an object @ and (): @HetXL()'),
    (RUN, ['HEAD = @HetXl()'], "matching reference '@HetXl()': did you mean HetXL?"),
    (RUN, ['HetXL.num_factor = 1'], "parameter named 'num_factor': did you mean num_factors?"),
    (
      ['gin/heads/hetxl.gin'],
      [],
      'does not exist in .: choose from contrastive_det.gin, contrastive_h',
    ),
    (['gin/heads/het.gin'], [], 'het_plugin/gin/heads/het.gin comes with the package'),
    (
      [str(parsing.gin_root() / 'heads')],
      [],
      'is a folder: choose from contrastive_det.gin, contr',
    ),
    (RUN, ['MIXTURE_OR_TASK_NAME = None'], 'mixture_or_task_name is None; it must be the name of'),
    (RUN, ["MIXTURE_OR_TASK_NAME = ['digits']"], "mixture_or_task_name is ['digits']; it must be"),
    (RUN, ["MODEL_DIR = 'http://x/y'"], 'no path can begin with http://: give a local one, or one'),
    (RUN, ["MODEL_DIR = 's3://x/y'"], "File system scheme 's3' not implemented"),
  ],
)
def test_config_errors_are_one_sentence_before_anything_is_written(
  files, extra, words, tmp_path, monkeypatch, capsys
):
  from het_plugin.runs import starting

  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as stop, command_line.one_sentence_errors():
    parsing.parse_config(files, [f"MODEL_DIR = '{tmp_path / 'run'}'", *extra])
    starting.train_from_gin()
  assert stop.value.code == exit_codes.WRONG_SETTING
  message = capsys.readouterr().err.strip()
  assert words in message.splitlines()[-1]
  assert message.splitlines()[-1].startswith('Error: ')
  # What is found once the folder is locked leaves a log of itself.
  left = {path.name for path in (tmp_path / 'run').glob('*')}
  assert left <= {'attempts', 'lock', 'logs'}


def test_a_misspelt_include_lists_what_there_is(tmp_path):
  path = tmp_path / 'mine.gin'
  path.write_text("import het_plugin.config\ninclude 'het_plugin/gin/heads/hetxl.gin'\n")
  with pytest.raises(ValueError, match='heads/hetxl.gin is included .*: choose from .* het_xl'):
    parsing.parse_config([str(path)], [])
  path.write_text("include 'other.gin'\n")
  with pytest.raises(ValueError, match='other.gin is included but does not exist$'):
    parsing.parse_config([str(path)], [])


@pytest.mark.parametrize(
  'binding, message',
  [
    ('EVAL_STEPS=0', 'EVAL_STEPS = 0 (train.eval_steps) must be at least 1'),
    ('BATCH_SIZE=12', 'BATCH_SIZE=12 must be a positive multiple of 8'),
    ('WARMUP_STEPS=500', 'WARMUP_STEPS=500 '),
    ('HEAD=@Det()', 'Det.num_classes is not set: bind it in a file or with --gin.Det.num_classes='),
    ('LEARNING_RATE=-1.0', 'LEARNING_RATE = -1.0 (warmup_schedule.peak_value) must be above 0'),
  ],
)
def test_messages_name_what_was_typed(binding, message, run_main, tmp_path):
  files = [f'--gin_file={file}' for file in RUN]
  said = run_main(
    train, *files, f"--gin.MODEL_DIR='{tmp_path / 'run'}'", f'--gin.{binding}', code=2
  )
  assert said.startswith(f'Error: {message}')


def test_what_t5x_needs_is_in_the_docs():
  error = ModuleNotFoundError("No module named 't5x'", name='t5x')
  assert 'docs/t5x.md' in command_line.one_sentence(error)


def test_flags_become_bindings():
  argv = command_line.rewrite_flags(['train', '--gin_file=a.gin', "--gin.MODEL_DIR='x=y'", 'rest'])
  assert argv == ['train', '--gin_file=a.gin', "--gin_bindings=MODEL_DIR = 'x=y'", 'rest']


@pytest.mark.parametrize(
  'argument, message',
  [
    (f'--output_dir={__file__}', 'test_gin.py is a file: name a folder'),
    ('--gin.MODEL_DIR', '--gin.MODEL_DIR lacks its value: write --gin.MODEL_DIR=VALUE'),
    ('--watch=nan', '--watch=nan must be a finite number'),
    ('--watch=inf', '--watch=inf must be a finite number'),
    ('--json=docs', '--json=docs is a folder: name a file, such as results.json'),
  ],
)
def test_flags_that_cannot_be_parsed_are_wrong_settings(argument, message, parsed_flags, capsys):
  main = evaluate if 'output_dir' in argument else status
  with parsed_flags(main), pytest.raises(SystemExit) as stop:
    command_line.parse_flags(['main', argument])
  assert stop.value.code == exit_codes.WRONG_SETTING
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('Error: ') and message in line


def test_what_makes_t5x_the_host_is_not_for_our_mains():
  with pytest.raises(ValueError, match='gin/t5x .*t5x.train, t5x.eval'):
    parsing.parse_config(['gin/t5x/train.gin', *RUN], bindings('digits_smoke.gin'), [str(ROOT)])


def test_without_t5x_its_engine_says_what_is_missing():
  # In a process of its own: here the names are the built-in trainer's already.
  code = 'import sys; sys.modules["t5x"] = None; import het_plugin.hosts.t5x.engine'
  result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
  assert 'docs/t5x.md' in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
  'ones,reason', [(jax.numpy.ones, 'allocating 4'), (np.ones, 'Unable to allocate 728. TiB')]
)
def test_too_little_memory_is_one_sentence(capsys, ones, reason):
  with pytest.raises(SystemExit) as stop, command_line.one_sentence_errors():
    jax.block_until_ready(ones((10**7, 10**7)))
  assert stop.value.code == exit_codes.WRONG_SETTING
  message = capsys.readouterr().err.strip()
  assert message.startswith('Error: ') and reason in message and 'num_factors' in message
  assert '\n' not in message
