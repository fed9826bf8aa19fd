"""A small contrastive model, its embeddings as arrays, and a tokenizer of letters."""

import dataclasses
import functools

import jax
import numpy as np
import optax

from het_plugin.backbones import TextTransformer, ViT
from het_plugin.heads import ContrastiveHetXL
from het_plugin.integrate import Integrator
from het_plugin.models import ContrastiveModel
from het_plugin.training.optimizers import OptaxWrapper
from het_plugin.training.partitioning import PjitPartitioner
from het_plugin.training.state import TrainState

VOCAB_SIZE = 64
SIZE = 8
TOWER = {'width': 16, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2}


class SmallContrastive(ContrastiveModel):
  """Counts how often its image tower is traced, hence compiled."""

  traces = 0

  def __init__(self, **of_image_tower):
    backbone = ViT(patch_size=4, pooling='gap', **TOWER, **of_image_tower)
    towers = backbone, TextTransformer(VOCAB_SIZE, **TOWER)
    super().__init__(
      *towers, ContrastiveHetXL(num_factors=2), OptaxWrapper(optax.sgd(0.1)), Integrator(1)
    )

  def image_embeddings(self, params, batch):
    self.traces += 1
    return super().image_embeddings(params, batch)


def opened(seed=0, model_shards=1):
  """Model, partitioner, PartitionSpecs and placed parameters."""
  partitioner, specs, init = _initializer(model_shards)
  return SmallContrastive(), partitioner, specs, init(jax.random.key(seed))


@functools.cache
def _initializer(model_shards):
  """One program for all seeds."""
  model = SmallContrastive()
  partitioner = PjitPartitioner(num_partitions=model_shards)
  shapes = {'image': (1, SIZE, SIZE, 1), 'text': (1, 12)}

  def init(key):
    variables = model.get_initial_variables(key, shapes)
    return TrainState.create(model.optimizer_def, variables)

  specs = partitioner.get_mesh_axes(jax.eval_shape(init, jax.random.key(0))).params
  return partitioner, specs, partitioner.partition(lambda key: init(key).params, None, specs)


@dataclasses.dataclass(frozen=True)
class Letters:
  """A tokenizer: letters as ids, 1 at the end."""

  vocabulary: str = 'letters'
  length: int = 12
  vocab_size: int = VOCAB_SIZE

  def __call__(self, texts):
    rows = np.zeros((len(texts), self.length), np.int32)
    for row, text in zip(rows, texts, strict=True):
      ids = [2 + ord(letter) % (VOCAB_SIZE - 2) for letter in text][: self.length - 1] + [1]
      row[: len(ids)] = ids
    return rows


_embed_text = jax.jit(lambda *given: SmallContrastive().text_embeddings(*given))
_embed_images = jax.jit(lambda *given: SmallContrastive().image_embeddings(*given))


def text_vectors(params, tokens):
  """Embeddings of the text tower on one device."""
  return np.asarray(_embed_text(jax.device_get(params), tokens))


def image_vectors(params, images):
  return np.asarray(_embed_images(jax.device_get(params), {'image': images}))


def class_vectors(params, names, templates, tokenize):
  """Class embeddings."""
  texts = [[template.replace('{}', name) for name in names] for template in templates]
  total = sum(text_vectors(params, tokenize(x)) for x in texts)
  return total / np.linalg.norm(total, axis=1, keepdims=True)
