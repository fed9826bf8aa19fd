"""Heteroscedastic classifier heads (HET-XL, HET, HET-H, DET) with a learned temperature for JAX.

    from het_plugin import HetXL, Integrator, LearnedTemperature, example_keys

The names below are imported when they are first used. `import het_plugin` alone imports neither JAX
nor TensorFlow, and the heads, integrators and backbones import JAX, flax and NumPy only.
"""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:
  from het_plugin.backbones import ResNet, TextTransformer, ViT, resnet, text_transformer, vit
  from het_plugin.heads import (
    BatchSoftmax,
    Classifier,
    ContrastiveDet,
    ContrastiveHetXL,
    Det,
    FixedTemperature,
    Het,
    Heteroscedastic,
    HetH,
    HetXL,
    LearnedTemperature,
    LogitScale,
    Pairs,
    PredictiveLogits,
    contrastive_nll,
    symmetric_nll,
  )
  from het_plugin.integrate import (
    GaussianLogits,
    Integrator,
    Location,
    LowRank,
    cross_entropy,
    example_keys,
    iid,
    shared_key,
    sobol,
  )
  from het_plugin.models import ClassificationModel, ContrastiveModel

__version__ = '0.1.0'
__getattr__, _names = faces.on_first_use(__name__)
# The models need the extra `train`, so help() and a star import, which import all names, omit them.
__all__ = ['__version__', *(x for x in _names if not x.endswith('Model'))]


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
