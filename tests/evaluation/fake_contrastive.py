"""A contrastive model of two linear towers, what numpy makes of its parameters, and its tokens."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import partitioning as flax_partitioning

from het_plugin.training.optimizers import OptaxWrapper
from het_plugin.training.partitioning import PjitPartitioner
from het_plugin.training.state import TrainState

VOCAB_SIZE, WIDTH = 64, 16


class Towers(nn.Module):
  """Pixels times a matrix; the mean of the tokens' vectors."""

  @nn.compact
  def __call__(self, image: jax.Array, text: jax.Array) -> tuple[jax.Array, jax.Array]:
    pixels = image.reshape(image.shape[0], -1)
    init = nn.initializers.normal(1.0)
    param = flax_partitioning.param_with_axes
    kernel = param('image', init, (pixels.shape[1], WIDTH), axes=(None, 'embed'))
    table = param('text', init, (VOCAB_SIZE, WIDTH), axes=('vocab', 'embed'))
    real = (text > 0)[..., None]  # [N, L, 1]
    vectors = jnp.where(real, table[text], 0.0).sum(axis=1)
    return pixels @ kernel, vectors / jnp.maximum(real.sum(axis=1), 1)


class FakeContrastive:
  """Counts how often its image tower is traced, hence compiled."""

  traces = 0

  def __init__(self, optimizer_def=None):
    self.module = Towers()
    self.optimizer_def = optimizer_def

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    del input_types
    return self.module.init(
      rng, jnp.zeros(input_shapes['image'], jnp.float32), jnp.zeros((1, 2), jnp.int32)
    )

  def image_embeddings(self, params, batch):
    self.traces += 1
    none = jnp.zeros((1, 2), jnp.int32)
    return self.module.apply({'params': params}, batch['image'], none)[0]

  def text_embeddings(self, params, text):
    size = params['image'].shape[0]
    return self.module.apply({'params': params}, jnp.zeros((1, size)), text)[1]

  def class_log_prob(self, params, batch, class_embeddings, num_samples):
    """Noise of standard deviation 5 on the image, by the example's index."""
    phi = self.image_embeddings(params, batch)

    def of_example(phi, index):
      keys = jax.random.split(jax.random.fold_in(jax.random.key(0), index), num_samples)
      noise = jax.vmap(lambda key: jax.random.normal(key, phi.shape))(keys)
      log_prob = jax.nn.log_softmax((phi + 5 * noise) @ class_embeddings.T)  # [S, K]
      return jax.nn.logsumexp(log_prob, axis=0) - jnp.log(num_samples)

    return jax.vmap(of_example)(phi, batch['index'])


def opened(seed=0, model_shards=1, size=8):
  """Model, partitioner, PartitionSpecs and placed parameters."""
  model = FakeContrastive(OptaxWrapper(optax.sgd(0.1)))
  partitioner = PjitPartitioner(num_partitions=model_shards)
  variables = model.get_initial_variables(jax.random.key(seed), {'image': (1, size, size, 1)})
  specs = partitioner.get_mesh_axes(TrainState.create(model.optimizer_def, variables)).params
  params = jax.device_put(variables['params'], partitioner.shardings(specs))
  return model, partitioner, specs, params


@dataclasses.dataclass(frozen=True)
class Letters:
  """A tokenizer: letters as ids, 1 at the end."""

  vocabulary: str = 'letters'
  length: int = 12

  def __call__(self, texts):
    rows = np.zeros((len(texts), self.length), np.int32)
    for row, text in zip(rows, texts, strict=True):
      ids = [2 + ord(letter) % (VOCAB_SIZE - 2) for letter in text][: self.length - 1] + [1]
      row[: len(ids)] = ids
    return rows


def text_vectors(params, tokens):
  """What the text tower gives, in float64."""
  table = np.asarray(params['text'], np.float64)
  return np.stack([table[row[row > 0]].mean(axis=0) for row in tokens])


def class_vectors(params, names, templates, tokenize):
  """Class embeddings, in float64."""
  total = 0.0
  for template in templates:
    x = text_vectors(params, tokenize([template.replace('{}', name) for name in names]))
    total = total + x / np.linalg.norm(x, axis=1, keepdims=True)
  return total / np.linalg.norm(total, axis=1, keepdims=True)


def image_vectors(params, images):
  return images.reshape(len(images), -1).astype(np.float64) @ np.asarray(
    params['image'], np.float64
  )
