"""Sweeps become jobs, and jobs become arguments that training reads with the right types."""

import pytest

import gin
from het_plugin.cli import command_line
from het_plugin.system import flag_values
from launch import sweep

FILES = ['gin/runs/digits_smoke.gin']


def test_heads_by_seeds_by_rates():
  jobs = sweep.make_jobs(
    'runs/x/',
    FILES,
    ['BATCH_SIZE = 8'],
    heads=['det', 'het_xl'],
    sweeps=['RANDOM_SEED=0,1', 'LEARNING_RATE=1e-3,3e-4'],
  )
  assert len(jobs) == 8
  assert [job.name for job in jobs[:3]] == [
    'det-RANDOM_SEED=0-LEARNING_RATE=1e-3',
    'det-RANDOM_SEED=0-LEARNING_RATE=3e-4',
    'det-RANDOM_SEED=1-LEARNING_RATE=1e-3',
  ]
  assert jobs[-1].arguments() == [
    '--gin_file=gin/runs/digits_smoke.gin',
    '--gin_file=het_plugin/gin/heads/het_xl.gin',
    '--gin.BATCH_SIZE=8',
    '--gin.RANDOM_SEED=1',
    '--gin.LEARNING_RATE=3e-4',
    "--gin.MODEL_DIR='runs/x/het_xl-RANDOM_SEED=1-LEARNING_RATE=3e-4'",
  ]


def test_without_a_sweep_the_folder_is_the_runs_own():
  (job,) = sweep.make_jobs('gs://b/x', FILES, gin_search_paths=['.', '/configs'])
  assert (job.name, job.model_dir) == ('', 'gs://b/x')
  assert '--gin_search_paths=.,/configs' in job.arguments()


@pytest.mark.parametrize(
  ('text', 'values'),
  [
    ('True,False,None', ['True', 'False', 'None']),
    ('\'a,b\',"c"', ["'a,b'", '"c"']),
    ('(1, 2),[3, {4: 5}]', ['(1, 2)', '[3, {4: 5}]']),
    ('@vit(),%BACKBONE', ['@vit()', '%BACKBONE']),
  ],
)
def test_values_stay_what_they_are(text, values):
  assert flag_values.parse_sweep(f'x.y={text}') == ('x.y', values)


def test_values_arrive_in_gin_with_their_types():
  """Through the flags of training."""
  values = ['True', 'None', "'it is'", '(1, 2)', '1e-3']
  for value, wanted in zip(values, [True, None, 'it is', (1, 2), 1e-3], strict=True):
    (job,) = sweep.make_jobs("runs/a folder's", FILES, [f'ANYTHING = {value}'])
    rewritten = command_line.rewrite_flags(['train', *job.arguments()])
    bindings = [flag.removeprefix('--gin_bindings=') for flag in rewritten if 'bindings' in flag]
    gin.clear_config()
    gin.parse_config(bindings)
    assert gin.query_parameter('%ANYTHING') == wanted
    assert gin.query_parameter('%MODEL_DIR') == "runs/a folder's"


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'model_dir': '~/x'}, '--model_dir=~/x: only a shell expands ~'),
    ({'sweeps': ['RANDOM_SEED']}, '--sweep=RANDOM_SEED .*NAME=VALUE'),
    ({'sweeps': ['RANDOM_SEED=']}, '--sweep=RANDOM_SEED= has an empty value'),
    ({'sweeps': ['dtype=bfloat16']}, 'dtype=bfloat16'),
    ({'sweeps': ['head=1,2']}, 'use --heads'),
    ({'sweeps': ['x=1'], 'gin_bindings': ['x = 2']}, '--sweep=x='),
    ({'sweeps': ["x='a+b','a b','a_b'"]}, 'two swept values'),
  ],
)
def test_one_sentence_for_a_wrong_setting(change, words):
  with pytest.raises(ValueError, match=words):
    sweep.make_jobs(**{'model_dir': 'runs/x', 'gin_files': FILES, **change})
