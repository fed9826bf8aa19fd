"""`python -m het_plugin.plan` as a user runs it, and its parts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from PIL import Image

import gin
from het_plugin.planning import report, search, step, topology, worker
from het_plugin.planning.request import Request

ROOT = Path(__file__).parents[2]
RUN = ['gin/runs/glyphs_quickstart.gin', 'gin/heads/het_xl.gin']


def run(tmp_path, *flags, files=RUN, code=0):
  """(what is written to --json, or None; what is printed)."""
  out = tmp_path / 'plan.json'
  command = [sys.executable, '-m', 'het_plugin.plan', *(f'--gin_file={file}' for file in files)]
  environment = {**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '2'}
  result = subprocess.run(
    [*command, *flags, f'--json={out}'], cwd=ROOT, capture_output=True, text=True, env=environment
  )
  assert result.returncode == code, result.stderr
  text = result.stdout if code != 2 else result.stderr
  return json.loads(out.read_text()) if out.exists() else None, text


def request(**changes):
  fields = {'gin_files': RUN, 'gin_bindings': [], 'gin_search_paths': ['.']}
  return Request(**{**fields, 'topology': 'cpu:8', 'mesh': [4, 2], **changes})


def test_a_plan_for_virtual_devices(tmp_path):
  plan, text = run(tmp_path, '--topology=cpu:8', '--mesh=4,2')
  assert plan['mesh'] == {'data': 4, 'model': 2} and plan['num_devices'] == 8
  assert plan['fits'] and 'It fits' in text
  assert 0 < plan['peak_bytes_per_device'] < plan['hbm_bytes_per_device']
  held = plan['bytes_per_device']
  assert held['optimizer state'] == pytest.approx(2 * held['parameters'], rel=1e-3)
  assert sum(group['num_params'] for group in plan['parameters']) == plan['num_params']
  halves = [g for g in plan['parameters'] if g['split_over'] == 'model']
  assert all(2 * g['bytes_per_device'] == 4 * g['num_params'] for g in halves)
  assert {'kind', 'count', 'bytes', 'in_loops'} == set(plan['collectives'][0])
  assert not any(c['in_loops'] for c in plan['collectives'])
  # No [B, K] is gathered: a device's rows of it alone are 64 x 1152 floats.
  both = [*plan['collectives'], *plan['eval']['collectives']]
  assert all(c['kind'] != 'all-gather' or c['bytes'] < 4096 for c in both)


def test_a_replica_axis_splits_the_batch_and_repeats_the_parameters():
  flat = worker.compile_in_process(request(steps=['train']))
  slices = worker.compile_in_process(request(mesh=[2, 2, 2], steps=['train']))
  assert slices['mesh'] == {'replica': 2, 'data': 2, 'model': 2}
  for part in ('parameters', 'optimizer state', 'batch'):
    assert slices['bytes_per_device'][part] == flat['bytes_per_device'][part]
  assert slices['flops_per_device'] == flat['flops_per_device']


def test_epochs_of_data_that_are_elsewhere():
  absent = ["MIXTURE_OR_TASK_NAME = 'image_folder:/nowhere'", 'TRAIN_STEPS = None']
  settings = step.configure(
    request(gin_bindings=[*absent, 'TRAIN_EPOCHS = 1']), topology.get('cpu:8', 1)
  )
  assert settings['train_dataset_cfg'].num_epochs == 1


def test_memory_does_not_grow_with_samples():
  def peak(num_samples):
    bindings = [f'train/Integrator.num_samples = {num_samples}']
    asked = request(gin_bindings=bindings, steps=['train'])
    return worker.compile_in_process(asked)['peak_bytes_per_device']

  assert peak(1000) < 1.05 * peak(64)


@pytest.mark.parametrize(
  'flags,words',
  [
    (['--topology=v9:2x2'], '--topology=v9:2x2 is unknown: write cpu:N, or a TPU generation'),
    (['--topology=cpu:8', '--mesh=4,3'], '--mesh=4,3 has 12 devices; cpu:8 has 8'),
    (['--topology=cpu:8', '--mesh=8'], '--mesh=8 must be 2 or 3 whole numbers of at least 1'),
    (['--topology=cpu:8', '--num_slices=2'], 'is for TPU topologies'),
    (['--topology=cpu:8', '--gin.BATCH_SIZE=250'], 'batch_size=250 must be a positive multiple'),
    (['--topology=cpu:8', '--grid', '--heads=hett'], '--heads=hett unknown'),
  ],
)
def test_wrong_flags_are_one_sentence(tmp_path, flags, words):
  _, text = run(tmp_path, *flags, code=2)
  (line,) = [line for line in text.splitlines() if line.startswith('Error')]
  assert words in line


def test_grid(tmp_path):
  png = tmp_path / 'grid.png'
  tiny = ['vit.width = 16', 'vit.depth = 1', 'vit.mlp_dim = 16', 'vit.num_heads = 2']
  rows, text = run(
    tmp_path,
    '--topology=cpu:2',
    '--mesh=1,2',
    '--grid',
    '--heads=det,het_xl',
    '--batches=8',
    '--samples=5',
    f'--png={png}',
    *(f'--gin.{binding.replace(" ", "")}' for binding in tiny),
    files=RUN[:1],
  )
  cells = [(row['head'], row['b'], row['s']) for row in rows]
  assert cells == [('det', 8, 0), ('het_xl', 8, 5)]
  peak = {cell: row['peak_bytes_per_device'] for cell, row in zip(cells, rows, strict=True)}
  assert peak['det', 8, 0] < peak['het_xl', 8, 5]
  assert Image.open(png).size == (704, 660)
  assert 'TFLOP' in text


# Parts.


def fake_plan(batch, limit, model=2):
  return {
    'batch_size': batch,
    'num_samples': batch,
    'num_devices': 8,
    'mesh': {'data': 8 // model, 'model': model},
    'fits': batch <= limit,
    'peak_bytes_per_device': batch,
  }


@pytest.mark.parametrize('start', [4, 64, 4096])
@pytest.mark.parametrize('limit', [3, 4, 100, 1000])
def test_search_finds_the_largest_that_fits(start, limit):
  tried = []

  def compile_fn(value):
    tried.append(value)
    return fake_plan(value, limit)

  found = search.largest_that_fits('batch', fake_plan(start, limit), compile_fn, say=lambda _: None)
  if limit < 4:  # less than a row a shard
    assert found is None
  else:
    assert found <= limit < found + max(4, found // 16) + 4
    assert all(value % 4 == 0 for value in tried)
  assert len(set(tried)) == len(tried) < 25


def test_search_gives_up_somewhere():
  found = search.largest_that_fits(
    'samples', fake_plan(1000, 10**9), lambda s: fake_plan(s, 10**9), say=lambda _: None
  )
  assert found == 64000


def test_verdict_names_what_weighs_most_and_repeats_the_compiler():
  plan = {
    'fits': False,
    'hbm_bytes_per_device': 16 * 2**30,
    'peak_bytes_per_device': 20 * 2**30,
    'bytes_per_device': {
      'parameters': 2**30,
      'optimizer state': 2 * 2**30,
      'batch': 2**20,
      'activations, gradients and samples': 17 * 2**30,
    },
    'train': {'compiler_message': 'RESOURCE_EXHAUSTED: Ran out of memory\nUsed 20.00G of 16.00G'},
  }
  text = report.verdict(plan)
  assert '20.00 of 16.00 GiB' in text
  assert 'Ran out of memory Used 20.00G of 16.00G' in text
  assert 'activations' in text and 'num_microbatches' in text
  sharded = dict(plan['bytes_per_device'], parameters=30 * 2**30)
  assert 'fsdp.gin' in report.verdict({**plan, 'bytes_per_device': sharded})


@pytest.mark.parametrize(
  'name,expected',
  [
    ('cpu:12', ('cpu', '12')),
    ('v3:8x8', ('v3', '8x8')),
    ('v5p', ('v5p', '2x2x1')),
    ('v6e', ('v6e', '2x2')),
  ],
)
def test_topologies(name, expected):
  assert topology.parse(name) == expected


@pytest.mark.parametrize('name', ['cpu', 'cpu:0', 'v3:8', 'v3:8by8', 'tpu'])
def test_other_names_are_errors(name):
  with pytest.raises(ValueError, match='is unknown: write cpu:N'):
    topology.parse(name)


def test_without_libtpu_it_says_how_to_get_it(monkeypatch):
  monkeypatch.setitem(sys.modules, 'libtpu', None)
  with pytest.raises(ValueError, match=r"pip install 'het_plugin\[plan\]'"):
    topology.get('v5e:2x2')


# For TPUs.


@pytest.fixture
def libtpu():
  pytest.importorskip('libtpu', reason="libtpu, the extra 'plan', is not installed")


def test_a_plan_for_a_tpu_slice(libtpu):
  plan = worker.compile_in_process(request(topology='v5e:2x4'))
  assert plan['device_kind'] == 'TPU v5 lite' and plan['fits']
  assert plan['hbm_bytes_per_device'] == int(15.75 * 2**30)
  cpu = worker.compile_in_process(request())
  assert plan['flops_per_device'] == cpu['flops_per_device']
  for part in ('parameters', 'optimizer state', 'batch'):
    assert plan['bytes_per_device'][part] == cpu['bytes_per_device'][part]


def test_slices_joined_by_a_network(libtpu):
  plan = worker.compile_in_process(
    request(topology='v5e:2x2', num_slices=2, mesh=None, steps=['train'])
  )
  assert plan['mesh'] == {'replica': 2, 'data': 2, 'model': 2}


def test_too_little_memory_is_a_result(libtpu):
  bindings = ['BATCH_SIZE = 4194304']
  plan = worker.compile_in_process(
    request(topology='v5e:2x2', mesh=[4, 1], gin_bindings=bindings, steps=['train'])
  )
  assert not plan['fits']
  assert plan['peak_bytes_per_device'] > 100 * 2**30 > plan['hbm_bytes_per_device']
  assert 'memory' in plan['train']['compiler_message']
  assert 'The compiler on the train step' in report.verdict(plan)


@pytest.fixture
def fresh_config():
  yield
  gin.clear_config()


def test_every_published_run_can_be_planned(fresh_config):
  """Their state on the mesh that they bind, by shapes alone; compiling takes minutes."""
  for name in ('jft4b', 'jft300m', 'imagenet21k'):
    files = [f'gin/runs/{name}.gin', 'gin/models/vit_l_32.gin', 'gin/heads/het_xl.gin']
    asked = request(gin_files=files, topology='cpu:8', mesh=None)
    place = topology.Topology('cpu:8', jax.devices(), 2**34)
    settings = step.configure(asked, place)
    assert settings['partitioner'].model_shards == 4
    assert settings['model'].head.link == 'sigmoid'
    assert settings['model'].head.num_classes > 18_000
