"""Imported by gin/t5x/train.gin: registers t5x under the names that our run files bind.

Raises:
  ValueError: the built-in trainer has these names already.
  ModuleNotFoundError: t5x or a package that it needs is missing.
"""

import importlib

import gin
from het_plugin.config import registry


def _register() -> None:
  if registry.is_registered('het_plugin.training.train'):
    raise ValueError(
      'gin/t5x is for t5x.train, t5x.eval and t5x.infer. Leave it out to use the built-in trainer'
    )
  importlib.import_module('het_plugin.hosts.t5x.hooks')  # its error says that t5x is missing
  import t5x.train
  from t5x import utils

  registry.register('hosts.t5x')
  # t5x.eval and t5x.infer read with seqio, and restore checkpoints of t5x.train.
  gin.external_configurable(utils.DatasetConfig, 'SeqioDatasetConfig', 't5x.utils')
  gin.external_configurable(
    utils.RestoreCheckpointConfig, 'T5xRestoreCheckpointConfig', 't5x.utils'
  )
  if not registry.is_registered('train'):  # t5x.train registers its own
    gin.external_configurable(t5x.train.train, module='t5x.train')


_register()
