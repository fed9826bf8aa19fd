"""Runs of gin/runs inside t5x, against the same runs of the built-in trainer. They need t5x, which
docs/t5x.md says how to get.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from het_plugin.hosts.t5x import conversion
from het_plugin.training import checkpoint_reader

pytest.importorskip('t5x.train', reason='t5x is not importable: docs/t5x.md says how')
pytestmark = [pytest.mark.t5x, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
ENGINE = 'gin/t5x/train.gin'
STEPS = 4
TINY = [
  f'TRAIN_STEPS = {STEPS}',
  'EVAL_PERIOD = 2',
  'SAVE_PERIOD = 2',
  'STATS_PERIOD = 1',
  'WARMUP_STEPS = 1',
  'EVAL_STEPS = 2',
  'BATCH_SIZE = 16',
  'SaveCheckpointConfig.keep = None',
  'vit.width = 16',
  'vit.depth = 1',
  'vit.mlp_dim = 16',
  'vit.num_heads = 2',
  # By default t5x's scores follow the label; our evaluation has one distribution for all of them.
  'train/Integrator.num_samples = 4',
  'eval/Integrator.num_samples = 2',
  'eval/Integrator.tilt = False',
]
FEW_SHOT = [
  "ACTIONS = {'TRAIN': [@TerminateOnNanAction()], 'TRAIN_EVAL': [@FewShotAction()]}",
  'FewShotAction.image_size = 8',
  'FewShotAction.channels = 1',
  'FewShotAction.shots = (1,)',
  'FewShotAction.seeds = (0,)',
  'FewShotAction.datasets = (@FewShotDataset(),)',
  "FewShotDataset.name = 'digits'",
  "FewShotDataset.task = 'digits'",
  'FewShotDataset.max_train = 100',
  'FewShotDataset.max_test = 50',
  'FewShotAction.l2 = 1.0',
]
# The loss is NaN at the third step, and t5x evaluates at the fourth.
STOPS = [
  "ACTIONS = {'TRAIN': [@TerminateOnNanAction()]}",
  'STATS_PERIOD = 2',
  'LEARNING_RATE = 1e30',
  'TRAIN_STEPS = 6',
]


def files(head, run='digits_smoke', partitioning='model_8', engine=ENGINE):
  names = [f'gin/runs/{run}.gin', f'gin/heads/{head}.gin', f'gin/partitioning/{partitioning}.gin']
  return [engine, *names] if engine else names


def settings(model_dir, *extra):
  return [*TINY, f"MODEL_DIR = '{model_dir}'", *extra]


def hosted(folder, jobs):
  """Runs t5x's mains; returns their losses by job, {step: loss}, and what each ended with."""
  (folder / 'jobs.json').write_text(json.dumps(jobs))
  result = subprocess.run(
    [sys.executable, str(Path(__file__).with_name('hosted_run.py')), str(folder / 'jobs.json')],
    cwd=ROOT,
    env=os.environ | {'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])},
    capture_output=True,
    text=True,
  )
  ends = [line for line in result.stdout.splitlines() if line.startswith(('DONE', 'ValueError'))]
  assert result.returncode == 0 and len(ends) == len(jobs), result.stderr[-3000:]
  return ends


def losses(model_dir):
  """{step: training loss} of a run under t5x, from its event files."""
  from tensorboard.backend.event_processing import event_accumulator
  from tensorboard.util import tensor_util

  events = event_accumulator.EventAccumulator(str(Path(model_dir) / 'train'))
  events.Reload()
  return {e.step: float(tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors('loss')}


def our_losses(model_dir):
  lines = (Path(model_dir) / 'metrics.jsonl').read_text().splitlines()
  records = [json.loads(line) for line in lines]
  return {r['step']: r['train/loss'] for r in records if 'train/loss' in r}


def few_shot(model_dir):
  lines = (Path(model_dir) / 'fewshot.jsonl').read_text().splitlines()
  return [(r['step'], r['mean']) for r in map(json.loads, lines)]


def assert_same(a, b, steps, atol=1e-5):
  assert set(steps) <= set(a) and set(steps) <= set(b)
  np.testing.assert_allclose([a[s] for s in steps], [b[s] for s in steps], rtol=0, atol=atol)


def params(model_dir, step=STEPS):
  return checkpoint_reader.read_params(str(Path(model_dir) / f'checkpoint_{step}'))


@pytest.fixture(scope='module')
def ours(tmp_path_factory):
  """Runs of the built-in trainer: HET-XL with the few-shot action, and its first half exported."""
  import gin
  from het_plugin.config import parsing
  from het_plugin.runs.starting import train_from_gin

  folder = tmp_path_factory.mktemp('ours')
  gin_files = [str(ROOT / file) for file in files('het_xl', engine=None)]
  parsing.parse_config(gin_files, settings(folder / 'het_xl', *FEW_SHOT))
  train_from_gin()
  gin.clear_config()
  conversion.write_t5x(folder / 'het_xl' / 'checkpoint_2', folder / 'exported')
  return folder


@pytest.fixture(scope='module')
def theirs(ours, tmp_path_factory):
  """Runs of t5x.train, t5x.eval and t5x.infer, all in one process; one folder each."""
  folder = tmp_path_factory.mktemp('theirs')
  digits = files('het_xl')
  warm = [
    'CheckpointConfig.restore = @RestoreCheckpointConfig()',
    f"RestoreCheckpointConfig.path = '{folder / 'det'}'",
    'RestoreCheckpointConfig.fallback_to_scratch = True',
  ]
  no_eval = ['train.train_eval_dataset_cfg = None']
  det = files('det', partitioning='model_2')
  jobs = [
    ['train', digits, settings(folder / 'het_xl', *FEW_SHOT)],
    ['train', det, settings(folder / 'det', *no_eval)],
    ['train', det, settings(folder / 'micro', *no_eval, 'Trainer.num_microbatches = 4')],
    ['train', det, settings(folder / 'nan', *STOPS)],
    ['train', digits, settings(folder / 'warm', *no_eval, *warm)],
    ['train', digits, settings(ours / 'exported', *no_eval)],
    *(
      [
        main,
        [f'gin/t5x/{main}.gin', *digits[1:]],
        settings(folder / 'het_xl', f"{main.upper()}_OUTPUT_DIR = '{folder / main}'"),
      ]
      for main in ('eval', 'infer')
    ),
    [
      'train',
      files('het', run='glyphs'),  # K = 2,297 over 8 devices
      settings(folder / 'glyphs', *no_eval, 'TRAIN_STEPS = 2', 'ACTIONS = None'),
    ],
    [
      'train',
      digits,
      settings(
        folder / 'unused',
        *no_eval,
        'Trainer.num_microbatches = 4',
        'ClassificationModel.loss_normalizing_factor = None',
      ),
    ],
    ['train', digits, settings(folder / 'unused', *no_eval, 'NUM_CLASSES = 11')],
    ['train', digits, settings('relative', *no_eval)],
  ]
  ends = hosted(folder, jobs)
  shutil.copytree(folder / 'het_xl', folder / 'resumed')
  shutil.rmtree(folder / 'resumed' / f'checkpoint_{STEPS}')
  shutil.rmtree(folder / 'resumed' / 'train')
  ends += hosted(folder, [['train', digits, settings(folder / 'resumed', *FEW_SHOT)]])
  return folder, ends


def test_the_loss_curve_is_that_of_the_built_in_trainer(ours, theirs):
  folder, _ = theirs
  assert_same(our_losses(ours / 'het_xl'), losses(folder / 'het_xl'), range(1, STEPS + 1))
  wanted = params(ours / 'het_xl')
  for name, x in params(folder / 'het_xl').items():
    # Softmax does not see this bias: its gradient is rounding error, which Adam scales up.
    if not name.endswith('attention/key/bias'):
      np.testing.assert_allclose(x, wanted[name], atol=1e-5, err_msg=name)


def test_few_shot_accuracies_are_those_of_the_built_in_trainer(ours, theirs):
  folder, _ = theirs
  assert few_shot(folder / 'het_xl') == few_shot(ours / 'het_xl')
  assert [step for step, _ in few_shot(folder / 'het_xl')] == [2, 4]


def test_a_resumed_run_goes_on_with_the_next_example(theirs):
  folder, _ = theirs
  resumed = losses(folder / 'resumed')
  assert sorted(resumed) == [3, 4]
  assert_same(resumed, losses(folder / 'het_xl'), [3, 4], atol=1e-6)
  assert few_shot(folder / 'resumed') == few_shot(folder / 'het_xl')


def test_a_checkpoint_of_ours_goes_on_under_t5x(ours, theirs):
  assert_same(losses(ours / 'exported'), our_losses(ours / 'het_xl'), [3, 4])


def test_microbatches_do_not_change_the_training(theirs):
  folder, _ = theirs
  whole = params(folder / 'det')
  parts = params(folder / 'micro')
  for name, x in whole.items():
    # A bias of keys has no gradient but rounding, which Adam makes as large as any.
    if not name.endswith('attention/key/bias'):
      np.testing.assert_allclose(parts[name], x, atol=2e-5, err_msg=name)


def test_det_starts_het_xl(theirs):
  folder, _ = theirs
  start = params(folder / 'warm', 0)
  det = params(folder / 'det')
  for name, x in start.items():
    if name in det:
      np.testing.assert_array_equal(x, det[name], err_msg=name)
  assert {name for name in start if name not in det} == {
    *(f'head/covariance/{x}' for x in ('J', 'd_bias', 'd_kernel', 'v_bias', 'v_kernel')),
    'head/temperature/t',
  }


def test_eval_and_infer_agree_with_our_evaluation(theirs, run_main, tmp_path):
  from het_plugin.commands import evaluate

  folder, _ = theirs
  (line,) = (folder / 'eval/inference_eval/digits-metrics.jsonl').read_text().splitlines()
  metrics = json.loads(line)
  run_main(
    evaluate,
    f'--checkpoint={folder / "het_xl"}',
    '--split=test',
    f'--output_dir={tmp_path}',
    f'--json={tmp_path / "out.json"}',
  )
  (row,) = json.loads((tmp_path / 'out.json').read_text())
  assert metrics['step'] == STEPS
  assert metrics['nll'] == pytest.approx(row['nll'], abs=1e-5)
  assert metrics['precision_at_1'] == pytest.approx(row['precision_at_1'], abs=1e-6)
  (path,) = (folder / 'infer').glob('*.jsonl-00000-of-00001')
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  assert [row['inputs']['index'] for row in rows] == [[i] for i in range(359)]
  right = np.mean([row['prediction'] == row['inputs']['label'] for row in rows])
  assert right == pytest.approx(metrics['precision_at_1'])
  assert all(row['aux']['top5'][:1] == row['prediction'] for row in rows)


def test_an_action_on_training_metrics_stops_a_run_where_it_is_evaluated(theirs):
  folder, _ = theirs
  assert max(losses(folder / 'nan')) < 6
  assert not (folder / 'nan/checkpoint_6').exists()


def test_k_is_padded_for_any_number_of_devices(theirs):
  folder, _ = theirs
  assert params(folder / 'glyphs', 2)['head/bias'].shape == (2304,)
  assert params(folder / 'het_xl')['head/bias'].shape == (128,)


def test_what_would_train_another_model_is_refused(theirs):
  *_, microbatches, classes, relative, _ = theirs[1]
  assert 'ClassificationModel.loss_normalizing_factor = %BATCH_SIZE' in microbatches
  assert 'HetXL.num_classes=11 must be the number of classes of the task, 10' in classes
  assert "MODEL_DIR='relative' must be an absolute path" in relative


def test_a_configuration_of_t5x_takes_a_model_with_includes(tmp_path):
  (tmp_path / 'mine.gin').write_text(
    'from __gin__ import dynamic_registration\n'
    'import optax\n'
    'from t5x import optimizers\n'
    "include 't5x/configs/runs/pretrain.gin'\n"
    "MIXTURE_OR_TASK_NAME = 'digits'\n"
    "TASK_FEATURE_LENGTHS = {'image': 8, 'label': 1}\n"
    'NUM_CLASSES = 10\n'
    'BATCH_SIZE = 16\n'
    'RANDOM_SEED = 0\n'
    'TRAIN_STEPS = 2\n'
    'OPTIMIZER = @optimizers.OptaxWrapper()\n'
    'optimizers.OptaxWrapper.optax_optimizer = @optax.adamw()\n'
    'optax.adamw.learning_rate = 1e-3\n'
  )
  model = ['gin/t5x/stock.gin', 'gin/models/classification.gin', 'gin/models/vit_ti_16.gin']
  bindings = [
    f"MODEL_DIR = '{tmp_path / 'run'}'",
    "vit.variant = 'Ti/4'",
    *TINY[-7:],
    'train.eval_period = 2',
    'SaveCheckpointConfig.period = 2',
    "train_eval/DatasetConfig.split = 'test'",
    'train/DatasetConfig.seed = 0',
    *FEW_SHOT,
  ]
  bindings = [b.replace("[@TerminateOnNanAction()], 'TRAIN_EVAL': ", '') for b in bindings]
  job = ['train', [str(tmp_path / 'mine.gin'), *model, 'gin/heads/het_xl.gin'], bindings]
  assert hosted(tmp_path, [job]) == ['DONE']
  assert params(tmp_path / 'run', 2)['head/kernel'].shape == (16, 128)
  assert [step for step, _ in few_shot(tmp_path / 'run')] == [2]
