"""The table of slices, over every shape."""

import pytest

from het_plugin.planning import slices, topology

ALL = [
  (name, generation, shape)
  for name, generation in slices.GENERATIONS.items()
  for shape in generation.shapes
]
# Chips of the largest slice.
LARGEST = {'v2': 256, 'v3': 1024, 'v4': 4096, 'v5e': 256, 'v5p': 6144, 'v6e': 256, 'tpu7x': 9216}
# https://cloud.google.com/tpu/docs/v5p, v5e and v6e.
PUBLISHED = {
  'v5p': '2x2x1 2x2x2 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24',
  'v5e': '1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16',
  'v6e': '1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16',
}


def test_every_shape_exists_once_and_none_is_larger_than_the_pod():
  for name, generation in slices.GENERATIONS.items():
    chips = [slices.num_chips(shape) for shape in generation.shapes]
    assert len(set(generation.shapes)) == len(chips) and chips == sorted(chips)
    assert chips[-1] == LARGEST[name]
    assert generation.default_shape in generation.shapes
    dimensions = generation.default_shape.count('x')
    assert {shape.count('x') for shape in generation.shapes} == {dimensions}
    assert set(PUBLISHED.get(name, '').split()) <= set(generation.shapes)


def test_every_slice_has_devices_and_hosts_and_can_be_asked_for():
  for name, generation, shape in ALL:
    full = f'{name}:{shape}'
    chips = slices.num_chips(shape)
    assert topology.parse(full) == (name, shape)
    topology.check(full, 2, mesh=(2, generation.devices * chips))
    if generation.machines:
      hosts = slices.hosts(full)
      assert hosts.count * hosts.chips == chips and hosts.machine.endswith(f'-{hosts.chips}t')
  for name, generation in slices.GENERATIONS.items():
    if generation.queued:
      asked = {' '.join(slices.queued_resource(f'{name}:{shape}')) for shape in generation.shapes}
      assert len(asked) == len(generation.shapes)  # what is asked for tells the shape
  assert not slices.GENERATIONS['tpu7x'].queued and not slices.GENERATIONS['v2'].machines


@pytest.mark.parametrize(
  ('name', 'nearest'),
  [
    ('v5e:3x4', ['4x4', '2x4']),
    ('v5e:1x4', ['2x4', '2x2']),
    ('v5e:8x4', ['4x8', '4x4']),
    ('v6e:4x16', ['4x8', '8x16']),
    ('v6e:16x32', ['16x16', '8x16']),
    ('v5p:2x2x3', ['2x2x4', '2x2x2']),
    ('v5p:4x4', ['2x4x4', '2x2x4']),
    ('tpu7x:2x2x3', ['2x2x4', '2x2x2']),
    ('v4:16x16x32', ['8x16x32', '16x16x16']),
  ],
)
def test_a_slice_that_does_not_exist_is_refused_with_the_nearest(name, nearest):
  generation, _, shape = name.partition(':')
  assert slices.nearest(generation, shape) == nearest
  with pytest.raises(ValueError, match=f'no {shape} slice of .* are {" and ".join(nearest)}'):
    topology.check(name)
