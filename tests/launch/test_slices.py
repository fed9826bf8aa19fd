"""Hosts and names of TPU slices, as in the table of GKE's documentation."""

import pytest

from launch import slices


@pytest.mark.parametrize(
  ('topology', 'accelerator', 'chips', 'hosts'),
  [
    ('v4:2x2x1', 'tpu-v4-podslice', 4, 1),
    ('v5e:2x2', 'tpu-v5-lite-podslice', 4, 1),
    ('v6e:4x8', 'tpu-v6e-slice', 32, 8),
    ('tpu7x:4x4x4', 'tpu7x', 64, 16),
  ],
)
def test_hosts_and_names(topology, accelerator, chips, hosts):
  found = slices.parse(topology)
  assert (found.accelerator, found.chips, found.hosts) == (accelerator, chips, hosts)


@pytest.mark.parametrize(
  ('topology', 'num_slices', 'words'),
  [
    ('v5e', 1, None),  # one host, which is 2x2
    ('v5e:4x4', 2, None),
    ('v7:4x4', 1, 'is unknown'),
    ('v5e:3x3', 1, 'has the topologies 2x2'),
    ('v4:16x16x20', 1, 'up to 4096'),
    ('v5e:2x2', 2, 'several hosts'),
  ],
)
def test_wrong_topologies_are_one_sentence(topology, num_slices, words):
  if words is None:
    assert slices.parse(topology, num_slices).generation == 'v5e'
  else:
    with pytest.raises(ValueError, match=words) as error:
      slices.parse(topology, num_slices)
    assert '\n' not in str(error.value)
