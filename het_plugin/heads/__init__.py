"""Classifier heads: pre-logits to Gaussian logits."""

from het_plugin.heads.classifiers import Classifier, Det, Het, Heteroscedastic, HetH, HetXL
from het_plugin.heads.covariance import LowRankCovariance
from het_plugin.heads.hashing import class_buckets
from het_plugin.heads.temperature import FixedTemperature, LearnedTemperature

__all__ = [
  'Classifier',
  'Det',
  'FixedTemperature',
  'Het',
  'HetH',
  'HetXL',
  'Heteroscedastic',
  'LearnedTemperature',
  'LowRankCovariance',
  'class_buckets',
]
