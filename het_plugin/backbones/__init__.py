"""Backbones: images [B, H, W, C] to pre-logits phi [B, D] and intermediate representations."""

from het_plugin.backbones.resnet import ResNet, resnet
from het_plugin.backbones.vit import ViT, vit

__all__ = ['ResNet', 'ViT', 'resnet', 'vit']
