"""`python -m het_plugin.plan` as a user runs it, and its parts."""

import dataclasses
import json
import re
import sys
from unittest import mock

import jax
import pytest

from het_plugin.commands import plan as main
from het_plugin.integrate import proposal
from het_plugin.planning import report, search, step, topology, worker
from het_plugin.planning.worker import Request

RUN = ['het_plugin/gin/runs/glyphs.gin', 'het_plugin/gin/heads/het_xl.gin']
TINY = ['vit.width=16', 'vit.depth=1', 'vit.mlp_dim=16', 'vit.num_heads=2']


def request(**changes):
  fields = {'gin_files': RUN, 'gin_bindings': [], 'gin_search_paths': ['.']}
  return Request(**{**fields, 'topology': 'cpu:8', 'mesh': [4, 2], **changes})


def test_jax_takes_the_options_of_a_quick_plan():
  assert jax.jit(lambda x: x + 1).lower(1.0).compile(step.QUICK)(1.0) == 2.0


@pytest.mark.slow
def test_a_plan_for_virtual_devices(tmp_path, run_main):
  out = tmp_path / 'plan.json'
  files = [f'--gin_file={file}' for file in RUN]
  text = run_main(main, *files, '--topology=cpu:8', '--mesh=4,2', f'--json={out}')
  plan = json.loads(out.read_text())
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
  # Of each shard the most probable classes are gathered, as numbers and values; [B, K] never is.
  both = [*plan['collectives'], *plan['eval']['collectives']]
  candidates = 64 * 2 * (proposal.num_few(10) + 1) * 8
  assert all(c['kind'] != 'all-gather' or c['bytes'] <= candidates for c in both)
  # A replica axis splits the batch.
  few = ['train/Integrator.num_samples = 2']
  slices = step.plan(request(mesh=[2, 2, 2], steps=['train'], gin_bindings=few))
  assert slices['mesh'] == {'replica': 2, 'data': 2, 'model': 2}
  for part in ('parameters', 'optimizer state', 'batch'):
    assert slices['bytes_per_device'][part] == plan['bytes_per_device'][part]


@pytest.mark.parametrize(
  'flags,words',
  [
    (['--topology=v9:2x2'], '--topology=v9:2x2 is unknown: write a TPU generation of v2, '),
    (
      ['--topology=cpu:8', '--mesh=8'],
      '--mesh=8 must be a list of 2 (each a whole number, at least 1) or a list of 3',
    ),
    (['--topology=cpu:8', '--mesh='], '--mesh= must be a list of 2 (each'),
    (
      ['--topology=cpu:8', '--grid', '--heads=hett'],
      '--heads=hett must be one of',
    ),
    (['--topology=cpu:8', '--grid', '--heads='], '--heads= must be a list that is not empty'),
    (['--grid', '--search=batch'], '--search has an effect only without --grid'),
    (['--topology=cpu:8', '--quick'], '--quick is for TPU topologies, not --topology=cpu:8'),
    (['--png=x.png'], '--png has an effect only with --grid'),
    (['--topology=cpu:8', '--mesh=4,3'], '--mesh=4,3 has 12 devices; cpu:8 has 8'),
    (
      ['--topology=v5e:3x4'],
      'there is no 3x4 slice of v5e; the nearest that exist are 4x4 and 2x4',
    ),
    (
      ['--topology=cpu:1', "--gin.MIXTURE_OR_TASK_NAME='features:away.npz'"],
      'features:away.npz: a plan needs the file, for the width of its rows',
    ),
  ],
)
def test_wrong_flags_are_one_sentence(run_main, flags, words):
  files = [f'--gin_file={file}' for file in RUN]
  assert words in run_main(main, *files, *flags, code=2)


def test_a_grid_refuses_a_batch_that_does_not_divide_before_the_first(monkeypatch):
  place = topology.Topology('cpu:8', jax.devices(), 2**34)
  monkeypatch.setattr(topology, 'get', lambda *_: place)
  monkeypatch.setattr(search, 'compile_in_process', step.plan)  # here, and it stops before that
  asked = request(gin_files=RUN[:1], gin_bindings=TINY)
  with pytest.raises(ValueError, match='batch_size=66 must be a positive multiple of 4'):
    list(search.grid(asked, ['det'], [64, 66], [1]))


def test_a_batch_size_that_another_binding_sets_is_not_searched(monkeypatch):
  place = topology.Topology('cpu:8', jax.devices(), 2**34)
  monkeypatch.setattr(topology, 'get', lambda *_: place)
  monkeypatch.setattr(step, '_measure', lambda *_: pytest.fail('it compiles'))
  asked = request(gin_bindings=[*TINY, 'train/DatasetConfig.batch_size = 64'])
  with pytest.raises(ValueError, match='BATCH_SIZE = 128 does not set .* which is 64'):
    step.plan(asked.for_train_step(128))


def test_a_grid_has_one_row_where_the_number_of_samples_changes_nothing(monkeypatch):
  names = ('peak_bytes_per_device', 'fits', 'flops_per_device', 'hbm_bytes_per_device')
  plan = dict.fromkeys(names, 1.0) | {'num_samples': None}  # of an exact loss
  monkeypatch.setattr(search, 'compile_in_process', lambda _: plan)
  monkeypatch.setattr(search.report, 'line', str)
  rows = search.grid(request(), ['het_xl'], [8, 16], [10, 1000])
  assert [(row['b'], row['s']) for row in rows] == [(8, 0), (16, 0)]


def test_a_setting_of_one_head_of_a_grid_is_used():
  place = topology.Topology('cpu:8', jax.devices(), 2**34)
  asked = request(gin_files=RUN[:1], gin_bindings=['HetXL.num_factors = 4'])
  asked = asked.for_train_step(head='det')
  with pytest.raises(ValueError, match='HetXL.num_factors = 4 is used by nothing'):
    step.configure(asked, place)
  settings = step.configure(dataclasses.replace(asked, heads=['het_xl', 'det']), place)
  assert type(settings['model'].head).__name__ == 'Det'


def test_the_numbers_of_a_grid_are_written_before_its_picture(tmp_path, run_main, monkeypatch):
  row = {'head': 'det', 'b': 8, 's': 0, 'fits': True}
  row |= {'peak_bytes_per_device': 2**30, 'flops_per_device': 1e12, 'hbm_bytes_per_device': 2**34}

  def fails(_):
    raise ValueError('no picture')

  monkeypatch.setattr(search, 'grid', lambda *_: [row])
  flags = [f'--gin_file={RUN[0]}', '--grid', f'--json={tmp_path / "grid.json"}']
  flags.append(f'--png={tmp_path / "new" / "grid.png"}')
  run_main(main, *flags)
  assert (tmp_path / 'new' / 'grid.png').read_bytes().startswith(b'\x89PNG')
  (tmp_path / 'grid.json').unlink()
  monkeypatch.setattr(search, 'grid_png', fails)
  assert 'no picture' in run_main(main, *flags, code=2)
  assert json.loads((tmp_path / 'grid.json').read_text()) == [row]


@pytest.mark.slow
def test_grid(tmp_path, run_main, monkeypatch):
  """In this process; the test of one plan starts one."""
  monkeypatch.setattr(search, 'compile_in_process', step.plan)
  out = tmp_path / 'grid.json'
  png = tmp_path / 'grid.png'
  text = run_main(
    main,
    f'--gin_file={RUN[0]}',
    '--topology=cpu:2',
    '--mesh=1,2',
    '--grid',
    '--heads=det,het_xl',
    '--batches=8',
    '--samples=3',
    f'--png={png}',
    f'--json={out}',
    *(f'--gin.{binding}' for binding in TINY),
  )
  rows = json.loads(out.read_text())
  assert [(row['head'], row['b'], row['s']) for row in rows] == [('det', 8, 0), ('het_xl', 8, 3)]
  assert rows[0]['peak_bytes_per_device'] < rows[1]['peak_bytes_per_device']
  assert 'TFLOP' in text and png.read_bytes().startswith(b'\x89PNG')


# Parts.


def fake_plan(batch, limit, unit=4):
  return {
    'train': {'fits': batch <= limit},
    'batch_size': batch,
    'num_samples': batch,
    'batch_unit': unit,
    'fits': batch <= limit,
    'peak_bytes_per_device': batch,
  }


@pytest.mark.parametrize(
  'start, limit, unit', [(4, 1000, 4), (64, 100, 4), (4096, 4, 4), (64, 3, 4), (60, 100, 12)]
)
def test_search_finds_the_largest_that_fits(start, limit, unit):
  tried = []

  def compile_fn(value):
    tried.append(value)
    return fake_plan(value, limit)

  first = fake_plan(start, limit, unit) | {'fits': False}  # because of the eval step
  found = search.largest_that_fits('batch', first, compile_fn)
  if limit < 4:  # less than a row per shard
    assert found is None
  else:
    assert found <= limit < found + max(unit, found // 16) + unit
    assert all(value % unit == 0 for value in tried)
  assert len(set(tried)) == len(tried) < 25


def test_a_search_that_ends_says_that_more_may_fit(capsys):
  found = search.largest_that_fits(
    'samples', fake_plan(2**14, 2**20), lambda s: fake_plan(s, 2**20)
  )
  assert found == 2**16
  assert 'At least 65536, where the search ends' in capsys.readouterr().out


@pytest.mark.parametrize(
  'head, bindings, words',
  [
    ('det', [], 'the training loss of Det draws no samples'),
    ('het_xl', [], 'it goes on'),
    ('het_xl', ["HetXL.link = 'sigmoid'"], 'the training loss of HetXL draws no samples'),
    ('het_xl', ["HetXL.link = 'sigmoid'", "Integrator.method = 'sample'"], 'it goes on'),
  ],
)
def test_samples_are_searched_only_where_some_are_drawn(monkeypatch, head, bindings, words):
  """A head without them is refused before anything is compiled."""

  def goes_on(*_):
    raise ValueError('it goes on')

  monkeypatch.setattr(step.initial_state, 'init_fn', goes_on)
  place = topology.Topology('cpu:8', jax.devices(), 2**34)
  monkeypatch.setattr(topology, 'get', lambda *_: place)
  files = [RUN[0], f'het_plugin/gin/heads/{head}.gin']
  bindings = [*TINY, *bindings]
  with pytest.raises(ValueError, match=words):
    step.plan(request(gin_files=files, gin_bindings=bindings, needs_samples=True))


def test_a_search_takes_whole_groups_of_images(monkeypatch):
  """Batches that V-MoE's step refuses would end the search; 4 shards divide the groups of 8."""
  place = topology.Topology('cpu:8', jax.devices(), 2**34)
  monkeypatch.setattr(topology, 'get', lambda *_: place)
  files = [*RUN, 'het_plugin/gin/models/vmoe_s_32.gin']
  bindings = [*TINY, 'vit.depth = 2', "vit.variant = 'S/7'", 'BATCH_SIZE = 24']
  bindings.append('Trainer.num_microbatches = 3')
  measured = {'flops': 1.0, 'peak_bytes': 1, 'fits': True, 'collectives': []}
  progress = step.Progress()
  done = []
  monkeypatch.setattr(step, '_measure', lambda *_: done.append(progress.doing) or measured)
  plan = step.plan(request(gin_files=files, gin_bindings=bindings), progress)
  assert plan['batch_unit'] == 3 * 8
  assert done == ['compiling the train step', 'compiling the eval step']


def plan_that_does_not_fit():
  message = 'RESOURCE_EXHAUSTED: Ran out of memory\nUsed 20.00G of 16.00G'
  return {
    'fits': False,
    'hbm_bytes_per_device': 16 * 2**30,
    'peak_bytes_per_device': 20 * 2**30,
    'bytes_per_device': {
      'parameters': 2**30,
      'optimizer state': 2 * 2**30,
      'batch': 2**20,
      'activations, gradients and samples': 17 * 2**30,
    },
    'train': {'fits': False, 'peak_bytes': 20 * 2**30, 'compiler_message': message},
    'eval': {'fits': True, 'peak_bytes': 2**30, 'compiler_message': None},
  }


def test_verdict_names_what_weighs_most_and_repeats_the_compiler():
  plan = plan_that_does_not_fit()
  text = report.verdict(plan)
  assert '20.00 of 16.00 GiB' in text
  assert 'Ran out of memory Used 20.00G of 16.00G' in text
  assert 'activations' in text and 'num_microbatches' in text and 'EVAL_BATCH_SIZE' not in text
  assert 'convnext.remat' in text
  sharded = dict(plan['bytes_per_device'], parameters=30 * 2**30)
  assert 'fsdp.gin' in report.verdict({**plan, 'bytes_per_device': sharded})


def test_a_quick_plan_is_compiled_with_few_optimizations_and_says_so():
  traced = mock.Mock(jaxpr=jax.make_jaxpr(abs)(1.0))
  compiling = traced.lower.return_value.compile
  compiling.side_effect = jax.errors.JaxRuntimeError('Ran out of memory: Used 20.00G of 16.00G')
  place = topology.Topology('v6e:2x2', jax.devices(), 2**34)
  assert step._measure(lambda: traced, (), place, quick=True)['peak_bytes'] == 20 * 2**30
  compiling.assert_called_once_with(step.QUICK)
  assert 'Memory by --quick is rough' in report.verdict({**plan_that_does_not_fit(), 'quick': True})
  assert 'Memory by --quick is rough' not in report.verdict(plan_that_does_not_fit())


def test_verdict_says_that_only_the_eval_step_is_too_large():
  plan = plan_that_does_not_fit()
  plan['train'], plan['eval'] = plan['eval'], plan['train']
  text = report.verdict(plan)
  assert 'The compiler on the eval step: ' in text and 'a smaller EVAL_BATCH_SIZE' in text
  assert 'The largest part' not in text


def test_the_time_of_a_step_is_that_of_its_parts_at_peak_rates():
  """v3 has two devices per chip: 61.5 TFLOP/s, 450 GB/s, rings of 82 GB/s each."""
  moved = [{'kind': 'all-reduce', 'bytes': 41e6}, {'kind': 'all-gather', 'bytes': 82e6}]
  seconds = topology.step_seconds('v3:4x4', 123e9, 4.5e8, moved)
  assert seconds == pytest.approx(
    {
      'compute': 2e-3,
      'memory': 1e-3,
      'collectives': 2e-3,
      'with_overlap': 2e-3,
      'without_overlap': 5e-3,
    }
  )
  assert topology.step_seconds('cpu:8', 1e9, 1e9, moved) is None


def test_a_plan_says_what_it_does_and_how_it_ended(monkeypatch, capsys):
  waits = [None, KeyboardInterrupt]
  monkeypatch.setattr(step.time, 'sleep', mock.Mock(side_effect=waits))
  with pytest.raises(KeyboardInterrupt):
    step.Progress('compiling the eval step').keep_printing()
  assert re.fullmatch(
    r'compiling the eval step: \d+ CPU s in 0 s so far\n', capsys.readouterr().out
  )
  program = "import os; print('compiling', flush=True); os.write(2, b'a reason'); os.abort()"
  monkeypatch.setattr(worker, '_RUN', program)
  with pytest.raises(ChildProcessError, match='for cpu:8 ended by SIGABRT: a reason'):
    worker.compile_in_process(request())
  assert capsys.readouterr().err == 'compiling\n'


def test_virtual_devices_keep_the_flags_of_xla(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_x=1')
  flags = '--xla_x=1 --xla_force_host_platform_device_count=4'
  assert topology.environment('cpu:4')['XLA_FLAGS'] == flags


def test_topologies():
  known = {'cpu:12': ('cpu', '12'), 'v3:8x8': ('v3', '8x8'), 'v5p': ('v5p', '2x2x1')}
  assert {name: topology.parse(name) for name in known} == known
  for name in ('cpu', 'cpu:0', 'tpu', 'v3:8', 'v3:8by8', 'v5e:0x4'):
    with pytest.raises(ValueError, match=f'--topology={name} is unknown') as error:
      topology.parse(name)
    assert ('cpu:N' in str(error.value)) == (name[0] != 'v')


def test_without_libtpu_it_says_how_to_get_it(monkeypatch):
  monkeypatch.setitem(sys.modules, 'libtpu', None)
  with pytest.raises(ValueError, match=r"pip install 'het_plugin\[plan\]'"):
    topology.get('v5e:2x2')


@pytest.mark.slow
def test_plans_for_tpu_slices():
  pytest.importorskip('libtpu', reason="libtpu, the extra 'plan', is not installed")
  files = [*RUN, 'het_plugin/gin/partitioning/model_2.gin']
  asked = request(gin_files=files, topology='v5e:2x2', num_slices=2, mesh=None)
  plan = worker.compile_in_process(asked)
  assert plan['mesh'] == {'replica': 2, 'data': 2, 'model': 2}
  assert all(c['bytes'] for c in plan['collectives'])
  assert plan['device_kind'] == 'TPU v5 lite' and plan['fits']
  assert plan['hbm_bytes_per_device'] == int(15.75 * 2**30)
  cpu = worker.compile_in_process(request(mesh=[2, 2, 2]))
  assert plan['flops_per_device'] == cpu['flops_per_device']
  for part in ('parameters', 'optimizer state', 'batch'):
    assert plan['bytes_per_device'][part] == cpu['bytes_per_device'][part]

  quick = worker.compile_in_process(dataclasses.replace(asked, quick=True))
  assert quick['flops_per_device'] == plan['flops_per_device']
  assert 0.5 < quick['peak_bytes_per_device'] / plan['peak_bytes_per_device'] < 2

  asked = request(topology='v5e:2x2', mesh=[4, 1]).for_train_step(batch=4194304)
  plan = worker.compile_in_process(asked)  # too little memory is a result
  assert plan['peak_bytes_per_device'] > 2 * plan['hbm_bytes_per_device']
  assert 'The compiler on the train step' in report.verdict(plan)


def test_configurations_whose_data_are_elsewhere_can_be_planned():
  """By shapes alone, on the mesh that they bind; compiling takes minutes."""
  place = topology.Topology('cpu:8', jax.devices(), 2**34)
  for name in ('jft4b', 'imagenet21k'):
    files = [f'runs/{name}', 'models/vit_l_32', 'heads/het_xl']
    files = [f'het_plugin/gin/{file}.gin' for file in files]
    settings = step.configure(request(gin_files=files, mesh=None), place)
    assert settings['partitioner'].model_shards == 4
    assert settings['model'].head.num_classes > 18_000
  absent = ["MIXTURE_OR_TASK_NAME = 'image_folder:/nowhere'", 'TRAIN_STEPS = None']
  absent += ['SAVE_PERIOD = 100', 'EVAL_PERIOD = 100']
  settings = step.configure(request(gin_bindings=[*absent, 'TRAIN_EPOCHS = 1']), place)
  assert settings['train_dataset_cfg'].num_epochs == 1
