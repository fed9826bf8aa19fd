"""Settings that a run does not use: an error, or a warning for files that heads share."""

import pathlib

import pytest

import gin
from het_plugin.commands import quickstart, train
from het_plugin.config import parsing, registry, statements, uses

GIN = pathlib.Path(__file__).parents[2] / 'gin'
RUN = ['het_plugin/gin/runs/glyphs.gin', 'het_plugin/gin/heads/{head}.gin']
CONTRASTIVE = ('contrastive_det', 'contrastive_het_xl')
HEADS = ('het_xl', 'det', 'het', 'het_h', 'det_learned_tau')
FRAMES = ('train.gin',)


@pytest.fixture(autouse=True)
def registered():
  registry.register_trainer()


def config_text(head, *bindings, run='runs/glyphs', files=()):
  files = [f'het_plugin/gin/{name}.gin' for name in (run, *files, f'heads/{head}')]
  parsing.parse_config(files, ["MODEL_DIR = 'x'", *bindings])
  return gin.config_str()


TYPED = [
  ('det', 'HetXL.num_factors = 15', 'HEAD is @Det()'),
  ('het_xl', 'LR = 5', 'did you mean LEARNING_RATE?'),
  ('het_xl', 'WARMUP = 5', 'did you mean WARMUP_STEPS?'),
  ('het_xl', 'NOSUCHMACRO = 1', 'nothing refers to %NOSUCHMACRO'),
  ('het', 'Integrator.num_samples = 5', 'eval/Integrator.num_samples and train/Integrator.num_s'),
  ('het', 'trian/Integrator.num_samples = 8', 'eval/Integrator.num_samples and train/Integrator.'),
  ('het', 'test/Integrator.rotate = False', 'did you mean Integrator.rotate?'),
  ('het', 'heads.HetXL.num_factors = 8', 'HEAD is @Het()'),
  ('het', "RestoreCheckpointConfig.path = 'x'", 'nothing refers to @RestoreCheckpointConfig'),
  ('het', "resnet.variant = '50x1'", 'BACKBONE is @vit()'),
]


@pytest.mark.parametrize(('head', 'binding', 'meant'), TYPED)
def test_what_was_typed_must_be_used(head, binding, meant, run_main, tmp_path):
  files = [f'--gin_file={file.format(head=head)}' for file in RUN]
  folder = f'--gin.MODEL_DIR={str(tmp_path / "run")!r}'
  message = run_main(train, *files, folder, f'--gin.{binding.replace(" ", "")}', code=2)
  assert message.startswith(f'Error: {binding} is used by nothing: ') and meant in message
  assert not list(tmp_path.iterdir())


def test_what_is_used():
  extra = [
    'EVAL_STEPS = 3',
    'Integrator.rotate = False',
    'train/Integrator.num_samples = 8',
    'HEAD/HetXL.num_factors = 3',
    'BACKBONE = @resnet()',
    "resnet.variant = '50x1'",
    'TAU = 2.0',
    'LearnedTemperature.initial_tau = %TAU',
    'DatasetConfig.num_threads = 2',
    'Trainer.num_microbatches = 2',
    'train.trainer_cls = @mine/Trainer',
    'mine/Trainer.norm_groups = ()',
  ]
  uses.check(extra, config_text('het_xl', *extra))


def test_what_a_main_reads_itself():
  typed = ['FewShotAction.shots = (1, %MINE)', 'MINE = 3']
  text = config_text('det', *typed, 'ACTIONS = None')
  uses.check_typed(typed, [uses.of(text, called=['FewShotAction'])])
  with pytest.raises(ValueError, match='FewShotAction.shots = .* nothing refers to @FewShotAction'):
    uses.check_typed(typed, [uses.of(text)])


def test_bindings_of_other_packages_may_be_used_anywhere():
  @gin.configurable('elsewhere', module='tests')
  def elsewhere(size=None):
    del size

  extra = ['elsewhere.size = @mine/Integrator()', 'mine/Integrator.num_samples = %MINE', 'MINE = 3']
  uses.check(extra, config_text('det', *extra))


def test_settings_of_files(caplog):
  uses.check([], config_text('det'))  # the run has settings of all heads
  assert not caplog.records
  uses.check([], config_text('det', 'HetXL.num_factors = 15', 'MINE = 3'))
  (line,) = caplog.messages
  assert 'HetXL.num_factors = 15 is used by nothing: HEAD is @Det()' in line
  assert 'MINE = 3 is used by nothing' in line and 'initial_noise_scale' not in line
  caplog.clear()  # IMAGE_SIZE is a name of our files, and no misspelling of BATCH_SIZE
  uses.check([], config_text('det', 'IMAGE_SIZE = 32', 'WARMUP = 3'))
  assert caplog.messages == [
    'IMAGE_SIZE = 32 is used by nothing: nothing refers to %IMAGE_SIZE; '
    'WARMUP = 3 is used by nothing: did you mean WARMUP_STEPS?'
  ]


def test_one_of_several_runs_must_use_it(run_main, tmp_path):
  of_one = ['HetXL.num_factors = 15']
  uses.check(of_one, *(config_text(head, *of_one) for head in ('det', 'het_xl')))
  heads = ['--heads=det,het', f'--output_dir={tmp_path / "out"}']
  message = run_main(quickstart, *heads, '--gin.HetXL.num_factors=15', code=2)
  assert 'HetXL.num_factors = 15 is used by nothing' in message
  assert not list(tmp_path.iterdir())


def test_what_hides_a_setting(caplog):
  with pytest.raises(ValueError, match='^Integrator.num_samples = 8 is used by nothing: the run t'):
    uses.check([], config_text('het_xl', 'Integrator.num_samples = 8'))  # a file of ours
  of_files = ['Integrator.max_bytes = 2', 'eval/Integrator.max_bytes = 3']
  of_files += ['train/Integrator.max_bytes = 3']
  uses.check([], config_text('het_xl', *of_files))  # two layers of another's files
  assert 'Integrator.max_bytes = 2 is used by nothing' in caplog.text
  caplog.clear()
  typed = ['HEAD/HetXL.num_factors = 3']  # what was typed, a file of ours
  uses.check(typed, config_text('het_xl', *typed))
  assert not caplog.records


OWN = [
  "MIXTURE_OR_TASK_NAME = 'digits'",
  'NUM_CLASSES = 10',
  'IMAGE_SIZE = 32',
  'TRAIN_STEPS = 8',
  'VOCAB_SIZE = 99',
  'TEXT_LENGTH = 8',
  "ACTIONS = {'TRAIN_EVAL': [@FewShotAction(), @ZeroShotAction()]}",  # as their mains
]
NEED_BACKBONE = ('jft300m', 'jft4b', 'imagenet21k')
OF_LIT = ('contrastive', 'glyph_names', 'published_pairs', 'lit_')
NOT_ALONE = {
  'models/contrastive': {'eval/Integrator.num_samples', 'eval/Integrator.sampler'},  # see there
}


def keys(path):
  """What a gin file sets itself."""
  bound, macros = statements.parse(path.read_text())
  return {*bound, *macros}


@pytest.mark.parametrize(
  'path',
  [
    path
    for path in sorted(GIN.rglob('*.gin'))
    if 't5x' not in path.parts and path.name not in FRAMES
  ],
  ids=lambda path: f'{path.parent.name}/{path.stem}',
)
def test_every_setting_of_our_files_is_used_by_a_run(path):
  """With one of the heads, and never hidden."""
  of_lit = any(name in f'{path.parent.name}/{path.stem}' for name in OF_LIT)
  heads = CONTRASTIVE if of_lit else HEADS
  name = f'{path.parent.name}/{path.stem}'
  files = []
  if path.parent.name == 'runs':
    run = name
    files = ['models/vit_ti_16'] if path.stem in NEED_BACKBONE else []
  elif 'published' in name:
    run = name
    files = ['models/vit_ti_16']
  else:
    run = 'runs/lit_glyphs' if of_lit else 'runs/own_images'
    files = [name]
  unused = keys(path) - NOT_ALONE.get(name, set())
  for head in heads:
    if unused:
      found = uses.of(config_text(head, *OWN, run=run, files=files))
      assert not [key for key in found.settings if found.hiding(key)]
      unused -= found.used
  assert not unused
