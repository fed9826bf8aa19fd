"""Test set-up: 8 virtual CPU devices, quiet TensorFlow, a compilation cache, the image data, flags
of mains, a small trained run.
"""

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_OURS = ('het_plugin', 'launch', 'benchmarks', 'studies', 'tests')  # packages with flags
_CHECKOUT = Path(__file__).resolve().parent.parent

# Read by JAX and TensorFlow when they are first imported, which is after this file.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Tests compile for longer than they compute. Without the slow passes of LLVM, and without XLA's
# newer code generator for fused loops where jaxlib still has the older one, it takes half of the
# time. Two programs may then round the last bit of exp or erf_inv differently.
_FLAGS = (
  '--xla_force_host_platform_device_count=8',
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
  '--xla_cpu_use_fusion_emitters=false',
  '--xla_cpu_parallel_codegen_split_count=1',
)


def _known(flags):
  """Those of `flags` that this jaxlib knows: XLA ends a process that has another.

  Each is tried once, in a process of its own; the answers stay in .cache.
  """
  path = _CHECKOUT / '.cache' / f'xla_flags-{importlib.metadata.version("jaxlib")}.json'
  answers = json.loads(path.read_text()) if path.exists() else {}
  if not set(flags) <= set(answers):
    program = [sys.executable, '-c', 'import jax; jax.devices()']
    for flag in flags:
      environment = os.environ | {'XLA_FLAGS': flag}
      answers[flag] = not subprocess.run(program, env=environment, capture_output=True).returncode
    path.parent.mkdir(exist_ok=True)
    written = path.with_suffix(f'.{os.getpid()}')
    written.write_text(json.dumps(answers, indent=2))
    written.rename(path)  # another pytest may read it meanwhile
  return [flag for flag in flags if answers[flag]]


if 'XLA_FLAGS' not in os.environ:
  # libtpu ends a process that has flags of the CPU's compiler.
  asked = _FLAGS if importlib.util.find_spec('libtpu') is None else _FLAGS[:1]
  os.environ['XLA_FLAGS'] = ' '.join(_known(asked))
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')  # A notice on each import otherwise.
os.environ.setdefault('CUDA_VISIBLE_DEVICES', '')
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')  # Two workers compile for TPUs.
# The workers, the processes that tests start, and reruns compile the same programs.
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_CHECKOUT / '.cache' / 'jax'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')

# Tracing and lowering make many objects that live on. With Python's own thresholds, to look through
# them takes a tenth of that time.
gc.set_threshold(50_000, 10, 10)


class TfdsFiles:
  """Writes small prepared TFDS data sets and lets TFDS find them."""

  def __init__(self, root: Path):
    tfds = pytest.importorskip('tensorflow_datasets')  # takes seconds; few tests need it

    self.root = root
    self._tfds = tfds
    tfds.core.add_data_dir(str(root))

  def write(self, name, features, examples, file_format='array_record', supervised_keys=None):
    """Writes `examples`, {split: [example]}, as `tfds build` would, three a shard."""
    core = self._tfds.core
    folder = self.root / name / '1.0.0'
    folder.mkdir(parents=True)
    identity = core.DatasetIdentity(
      name=name, version=core.Version('1.0.0'), data_dir=str(folder), module_name=''
    )
    info = core.DatasetInfo(
      builder=identity,
      features=self._tfds.features.FeaturesDict(features),
      supervised_keys=supervised_keys,
    )
    writer = core.SequentialWriter(info, 3, overwrite=True, file_format=file_format)
    writer.initialize_splits(list(examples))
    writer.add_examples(examples)
    writer.close_all()


@pytest.fixture(scope='session')
def tfds_files(tmp_path_factory) -> TfdsFiles:
  return TfdsFiles(tmp_path_factory.mktemp('tfds'))


@pytest.fixture(scope='session')
def data_dir() -> Path:
  """Directory of image archives (.npz): $HET_PLUGIN_DATA, or shared/data beside the checkout."""
  path = Path(os.environ.get('HET_PLUGIN_DATA', _CHECKOUT.parent / 'shared' / 'data'))
  if not path.is_dir():
    pytest.skip(f'no image data at {path}; set HET_PLUGIN_DATA to a directory that has it')
  return path


@contextlib.contextmanager
def _parsed_flags(main, *arguments):
  from absl import flags

  from het_plugin.cli import command_line

  before = set(flags.FLAGS)
  getattr(main, 'Settings', main).define_flags()
  try:
    yield flags.FLAGS(command_line.rewrite_flags(['main', *map(str, arguments)]))
  finally:
    for name in set(flags.FLAGS) - before:
      # Libraries that a main imports define flags too, and look for them later.
      if flags.FLAGS.find_module_defining_flag(name).startswith(_OURS):
        delattr(flags.FLAGS, name)


@pytest.fixture(scope='module', autouse=True)
def few_memory_maps():
  """Frees compiled programs before they take all of the 65,530 maps that Linux allows a process."""
  yield
  maps = Path('/proc/self/maps')
  if 'jax' in sys.modules and maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
    sys.modules['jax'].clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def gin_left_clean():
  """No test leaves a gin configuration, which may be locked, to the next one."""
  yield
  if 'gin.config' in sys.modules:
    sys.modules['gin'].clear_config()


@pytest.fixture
def parsed_flags():
  """`with parsed_flags(main, *arguments) as argv`: the flags of a main's module, gone afterwards,
  since other mains have flags of the same names.
  """
  return _parsed_flags


@pytest.fixture
def run_main(capsys):
  """Runs a command in this process as a user would: run_main(module, *arguments) returns what it
  printed; with code=2, its one line on stderr. Flags and gin are as before afterwards.
  """
  import gin
  from het_plugin.cli import command_line

  def run(module, *arguments, code=0):
    with _parsed_flags(module, *arguments) as argv:
      try:
        if not code:
          command_line.call_command(module, argv)
          return capsys.readouterr().out
        with pytest.raises(SystemExit) as error:
          command_line.call_command(module, argv)
      finally:
        gin.clear_config()
    assert error.value.code == code
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith('Error: ')
    return message

  return run


@pytest.fixture
def call_script(monkeypatch):
  """Runs the main of a benchmark or a study, call_script(module, *flags), in this process, so that
  imports are shared.
  """
  monkeypatch.chdir(_CHECKOUT)

  def call(module, *flags):
    monkeypatch.setattr(sys, 'argv', [module, *flags])
    importlib.import_module(module).main()

  return call


@pytest.fixture
def run_script(call_script, tmp_path, capsys):
  """The same with --json: (rows, printed lines)."""

  def run(module, *flags):
    out = tmp_path / 'out.json'
    capsys.readouterr()
    call_script(module, *flags, f'--json={out}')
    return json.loads(out.read_text()), capsys.readouterr().out.splitlines()

  return run


@pytest.fixture(scope='session')
def digits_run(tmp_path_factory):
  """(directory, parameters of the last step) of a small HET-XL on digits: checkpoints 1 and 2."""
  return _train_on_digits(tmp_path_factory, 'het_xl')


@pytest.fixture(scope='session')
def digits_det_run(tmp_path_factory):
  """The same of DET."""
  return _train_on_digits(tmp_path_factory, 'det')


def _train_on_digits(tmp_path_factory, head):
  import jax
  import numpy as np

  import gin
  from het_plugin.config import parsing
  from het_plugin.runs.starting import train_from_gin

  folder = tmp_path_factory.mktemp('runs') / head
  parsing.parse_config(
    ['het_plugin/gin/runs/digits_smoke.gin', f'het_plugin/gin/heads/{head}.gin'],
    [
      f"MODEL_DIR = '{folder}'",
      'TRAIN_STEPS = 2',
      'WARMUP_STEPS = 0',
      'EVAL_PERIOD = 2',
      'SAVE_PERIOD = 1',
      'BATCH_SIZE = 8',
      'EVAL_STEPS = 1',
      # Too few for a fit, which takes five times as long to compile.
      *(f'{mode}/Integrator.num_samples = 2' for mode in ('train', 'eval')),
      'vit.width = 16',
      'vit.depth = 1',
      'vit.mlp_dim = 16',
      'vit.num_heads = 2',
    ],
  )
  _, state = train_from_gin()
  gin.clear_config()
  return folder, jax.tree.map(np.asarray, state.params)
