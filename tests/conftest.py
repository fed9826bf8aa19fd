"""Test set-up: 8 virtual CPU devices, quiet TensorFlow, a compilation cache, the image data."""

import os
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).resolve().parent.parent

# Read by JAX and TensorFlow when they are first imported, which is after this file.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')  # A notice on each import otherwise.
os.environ.setdefault('CUDA_VISIBLE_DEVICES', '')
# Reruns spend most of their time compiling the same small programs.
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_CHECKOUT / '.cache' / 'jax'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')


@pytest.fixture(scope='session')
def data_dir() -> Path:
  """Directory of image archives (.npz): $HET_PLUGIN_DATA, or shared/data beside the checkout."""
  path = Path(os.environ.get('HET_PLUGIN_DATA', _CHECKOUT.parent / 'shared' / 'data'))
  if not path.is_dir():
    pytest.skip(f'no image data at {path}; set HET_PLUGIN_DATA to a directory that has it')
  return path
