"""Parameters of a backbone in the layout of scan_layers and back, by the names of `weights`."""

import dataclasses

import jax
from flax import traverse_util

from het_plugin.weights import transfer


def _flat(tree):
  return traverse_util.flatten_dict({'backbone': tree}, sep='/')


def _tree(flat):
  return traverse_util.unflatten_dict(flat, sep='/')['backbone']


def stack(model, params, inputs):
  """`params` of `model` for the same model with scan_layers."""
  scanned = dataclasses.replace(model, scan_layers=True)
  shapes = _flat(jax.eval_shape(scanned.init, jax.random.key(0), inputs)['params'])
  return _tree(transfer.restacked(_flat(params), {name: x.shape for name, x in shapes.items()}))


def unstack(params):
  return _tree(transfer.unstacked(_flat(params)))
