"""Heads: map pre-logits to Gaussian logits, and pairs of representations to contrastive logits."""

from het_plugin.heads.batch_softmax import BatchSoftmax, symmetric_nll
from het_plugin.heads.classifiers import (
  AffineLoading,
  Classifier,
  Det,
  Het,
  Heteroscedastic,
  HetH,
  HetXL,
  class_buckets,
)
from het_plugin.heads.contrastive import (
  ContrastiveDet,
  ContrastiveHetXL,
  Pairs,
  class_log_prob,
  contrastive_nll,
)
from het_plugin.heads.covariance import LowRankCovariance, least_noise, noise_in_directions
from het_plugin.heads.predictive import PredictiveLogits, predictive_logits, row_keys, served
from het_plugin.heads.temperature import FixedTemperature, LearnedTemperature, LogitScale

HEADS = {'det': Det, 'het': Het, 'het_h': HetH, 'het_xl': HetXL}  # by the names of their gin files

CONFIGURABLES = {
  'classifiers': ('Det', 'Het', 'HetH', 'HetXL'),
  'contrastive': ('ContrastiveDet', 'ContrastiveHetXL'),
  'temperature': ('FixedTemperature', 'LearnedTemperature', 'LogitScale'),
}

__all__ = [
  'HEADS',
  'AffineLoading',
  'BatchSoftmax',
  'Classifier',
  'ContrastiveDet',
  'ContrastiveHetXL',
  'Det',
  'FixedTemperature',
  'Het',
  'HetH',
  'HetXL',
  'Heteroscedastic',
  'LearnedTemperature',
  'LogitScale',
  'LowRankCovariance',
  'Pairs',
  'PredictiveLogits',
  'class_buckets',
  'class_log_prob',
  'contrastive_nll',
  'least_noise',
  'noise_in_directions',
  'predictive_logits',
  'row_keys',
  'served',
  'symmetric_nll',
]
