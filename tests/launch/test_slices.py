"""Hosts and names of TPU slices, as in the table of GKE's documentation."""

import pytest

from launch import slices


@pytest.mark.parametrize(
  ('topology', 'expected'),
  [
    ('v4:2x2x1', ('tpu-v4-podslice', '2x2x1', 1)),
    ('v5e', ('tpu-v5-lite-podslice', '2x2', 1)),
    ('v6e:4x8', ('tpu-v6e-slice', '4x8', 8)),
    ('tpu7x:4x4x8', ('tpu7x', '4x4x8', 32)),
  ],
)
def test_hosts_and_names(topology, expected):
  assert slices.parse(topology) == expected


@pytest.mark.parametrize(
  ('topology', 'num_slices', 'words'),
  [
    ('v7:4x4', 1, 'is unknown'),
    ('v2:4x4', 1, 'GKE has no v2 slices'),
    ('v5e:3x3', 1, 'v5e has 2x2'),
    ('v4:8x4x4', 1, 'A <= B <= C'),
    ('v5e:2x2', 2, 'several hosts'),
  ],
)
def test_wrong_topologies_are_one_sentence(topology, num_slices, words):
  with pytest.raises(ValueError, match=words):
    slices.parse(topology, num_slices)
