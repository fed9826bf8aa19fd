"""Heteroscedastic classifier heads (HET-XL, HET, HET-H, DET) with a learned temperature for JAX.

    from het_plugin import HetXL, Integrator, LearnedTemperature, example_keys

The names below are imported when they are first used. `import het_plugin` alone imports neither JAX
nor TensorFlow, and the heads, integrators and backbones import JAX, flax and NumPy only.
"""

from het_plugin.system import faces

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
# The models need the extra `train`, so help() and a star import, which import all names, omit them.
__all__ = ['__version__', *(x for room in _ROOMS if room != 'models' for x in _ROOMS[room])]
__getattr__ = faces.on_first_use(__name__, _ROOMS)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
