"""The fingerprint of parameters: exact, and the same however they lie on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from het_plugin.evaluation.fingerprint import _bit_sum, params_fingerprint
from het_plugin.training.partitioning import PjitPartitioner

PARAMS = {
  'a': {'kernel': np.random.default_rng(0).normal(size=(8, 16, 3)).astype(np.float32)},
  'b': jnp.arange(8, dtype=jnp.bfloat16),
  'tau': np.float32(0.5),
}


def test_the_sum_against_integers_of_any_size():
  bits = PARAMS['a']['kernel'].view(np.uint32).ravel()
  expected = sum(int(b) * (2 * i + 1) for i, b in enumerate(bits)) % 2**32
  assert int(_bit_sum(PARAMS['a']['kernel'])) == expected


@pytest.mark.parametrize('model_shards', [1, 2, 8])
def test_it_does_not_depend_on_the_mesh(model_shards):
  specs = {
    'a': {'kernel': PartitionSpec('data', 'model')},
    'b': PartitionSpec('model'),
    'tau': None,
  }
  shardings = PjitPartitioner(num_partitions=model_shards).shardings(specs)
  placed = jax.device_put(PARAMS, shardings)
  assert params_fingerprint(placed) == params_fingerprint(PARAMS)


def test_every_change_shows():
  kernel = PARAMS['a']['kernel']
  swapped = kernel.copy()
  swapped[0, 0, :2] = swapped[0, 0, 1::-1]
  ulp = kernel.copy()
  ulp[-1, -1, -1] = np.nextafter(ulp[-1, -1, -1], np.float32(10))
  others = [
    {**PARAMS, 'a': {'kernel': swapped}},
    {**PARAMS, 'a': {'kernel': ulp}},
    {**PARAMS, 'a': {'bias': kernel}},
    {**PARAMS, 'a': {'kernel': kernel.reshape(16, 8, 3)}},
  ]
  assert len({params_fingerprint(x) for x in [PARAMS, *others]}) == 5
