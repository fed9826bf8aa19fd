"""Backbones: images [B, H, W, C] or token ids [B, L] to pre-logits phi [B, D] and intermediate
representations.
"""

from het_plugin.backbones.convnext import ConvNeXt, convnext
from het_plugin.backbones.mlp import Mlp
from het_plugin.backbones.moe import SoftMoe, SparseMoe
from het_plugin.backbones.plain import PlainBackbone, as_backbone, with_axes
from het_plugin.backbones.resnet import ResNet, resnet
from het_plugin.backbones.text import TextTransformer, text_transformer
from het_plugin.backbones.vit import ViT, vit
from het_plugin.backbones.wide_resnet import WideResNet, wide_resnet

CONFIGURABLES = {
  'convnext': ('convnext',),
  'mlp': ('Mlp',),
  'moe': ('SoftMoe', 'SparseMoe'),
  'resnet': ('resnet',),
  'text': ('text_transformer',),
  'vit': ('vit',),
  'wide_resnet': ('wide_resnet',),
}
# Settings that may change between two starts of a run without changing its results
# (config/changes.py).
SAME_RESULTS = ('*.remat',)

__all__ = [
  'ConvNeXt',
  'Mlp',
  'PlainBackbone',
  'ResNet',
  'SoftMoe',
  'SparseMoe',
  'TextTransformer',
  'ViT',
  'WideResNet',
  'as_backbone',
  'convnext',
  'resnet',
  'text_transformer',
  'vit',
  'wide_resnet',
  'with_axes',
]
