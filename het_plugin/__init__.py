"""Heteroscedastic classifier heads (HET-XL, HET, HET-H, DET) with a learned temperature for JAX.

    from het_plugin import HetXL, Integrator, LearnedTemperature, example_keys

The names below are imported when they are first used. `import het_plugin` alone imports neither JAX
nor TensorFlow, and the heads, integrators and backbones import JAX, flax and NumPy only.
"""

import importlib

__version__ = '0.1.0'

_ROOMS = {
  'backbones': ('ResNet', 'TextTransformer', 'ViT', 'resnet', 'text_transformer', 'vit'),
  'heads': (
    'Classifier',
    'Det',
    'Het',
    'HetH',
    'HetXL',
    'Heteroscedastic',
    'BatchSoftmax',
    'ContrastiveDet',
    'ContrastiveHetXL',
    'Pairs',
    'contrastive_nll',
    'symmetric_nll',
    'FixedTemperature',
    'LearnedTemperature',
    'LogitScale',
    'PredictiveLogits',
  ),
  'integrate': (
    'GaussianLogits',
    'Integrator',
    'Location',
    'cross_entropy',
    'example_keys',
    'iid',
    'shared_key',
    'sobol',
  ),
  'models': ('ClassificationModel', 'ContrastiveModel'),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

# The models need the extra `train`, so help() and a star import, which import all names, omit them.
__all__ = ['__version__', *(name for name, room in _ROOM_OF.items() if room != 'models')]


def __getattr__(name: str):
  if name in _ROOM_OF:
    return getattr(importlib.import_module(f'het_plugin.{_ROOM_OF[name]}'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
