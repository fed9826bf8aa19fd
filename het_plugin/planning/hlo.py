"""Reads collectives and cycles of a compiled program; those in loops count once per iteration."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')

_BYTES = {'pred': 1, 's4': 0.5, 'u4': 0.5, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2}
_BYTES |= {'f16': 2, 's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'c64': 8}
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}', re.M | re.S)
_COLLECTIVE = re.compile(rf'= (.*?) ({"|".join(KINDS)})(-start)?\(')
_FUSED = 'async_collective_fusion_config'
_CHANNEL = re.compile(r'channel_id=(\d+)')
_SHAPE = re.compile(r'(\w+)\[([\d,]*)\]')
_CALLED = re.compile(r'(?:body|calls|to_apply|branch_computations)=\{?((?:%?[\w.-]+(?:, )?)+)\}?')
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_CONDITION = re.compile(r'condition=%?([\w.-]+)')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CONSTANT = re.compile(r'= s32\[\]\S* constant\((\d+)\)')


@dataclasses.dataclass(frozen=True)
class Collective:
  """One of `KINDS` of collectives of a program, on one device.

  `count` is how often it runs. `bytes` is the size of all its results; for a reduce-scatter it is
  the size of the operands. `in_loops` is the number of its instructions inside loops.
  """

  kind: str
  count: int
  bytes: int
  in_loops: int


def collectives(hlo: str) -> list[Collective]:
  """Collectives of a compiled program (`compiled.as_text()`), by kind in the order of `KINDS`.

  Where the compiler does not state how often a loop runs, as libtpu does not, the condition i < N
  of jax's loops says so; a loop with another condition counts as one iteration. Of the branches of
  a conditional the one with the most bytes counts. libtpu repeats an asynchronous collective, with
  its channel, in every fusion that overlaps with it: it counts once. libtpu's computation
  all-reduce-scatter has an all-reduce, which is compiled as a reduce-scatter.
  """
  counts = Counter()
  sizes = Counter()
  loops = Counter()
  for kind, times, size, in_loop in _moved(*parse(hlo)):
    counts[kind] += times
    sizes[kind] += times * size
    loops[kind] += in_loop
  return [Collective(k, counts[k], int(sizes[k]), loops[k]) for k in KINDS if counts[k]]


def cycles(hlo: str) -> int:
  """The cycles of a core that libtpu estimates for a compiled program.

  It has no estimate for sorts, gathers and scatters, which are left out.
  """
  computations, entry = parse(hlo)
  return sum(
    times * sum(map(int, _CYCLES.findall(computations[name])))
    for name, times, _ in _visits(computations, entry, 1, False)
  )


def _moved(computations: Mapping[str, str], entry: str) -> Iterator[tuple[str, int, float, bool]]:
  """Every collective under a computation: (kind, times it runs, bytes, inside a loop)."""
  started = set()
  for name, times, in_loop in _visits(computations, entry, 1, False):
    for line in computations[name].splitlines():
      if (found := _COLLECTIVE.search(line)) is None:
        continue
      shape, kind, start = found.groups()
      if _FUSED in line and (channel := _CHANNEL.search(line)):
        if (kind, channel[1]) in started:
          continue
        started.add((kind, channel[1]))
      if kind == 'reduce-scatter':
        size = _operand_bytes(line[found.end() :], computations[name])
      else:
        size = _result_bytes(shape, bool(start), kind)
      if kind == 'all-reduce' and name.startswith('all-reduce-scatter'):
        kind = 'reduce-scatter'
      yield kind, times, size, in_loop


def parse(hlo: str) -> tuple[dict[str, str], str]:
  """The lines of every computation of a compiled program, by its name, and the entry's name."""
  found = _COMPUTATION.findall(hlo)
  entry = next(name for is_entry, name, _ in found if is_entry)
  return {name: lines for _, name, lines in found}, entry


def _visits(
  computations: Mapping[str, str], name: str, times: int, in_loop: bool
) -> Iterator[tuple[str, int, bool]]:
  """Every call of every computation under `name`: (computation, times it runs, inside a loop)."""
  yield name, times, in_loop
  for line in computations[name].splitlines():
    is_loop = ' while(' in line
    trips = _trips(computations, line) if is_loop else 1
    for group in _CALLED.findall(line):
      # The computation of a reduction (to_apply) has no collectives.
      names = [name for name in re.findall(r'[\w.-]+', group) if name in computations]
      if ' conditional(' in line:
        names = [max(names, key=functools.partial(_bytes, computations))]
      for called in names:
        yield from _visits(computations, called, times * trips, in_loop or is_loop)


def _bytes(computations: Mapping[str, str], name: str) -> float:
  return sum(times * size for _, times, size, _ in _moved(computations, name))


def _trips(computations: Mapping[str, str], line: str) -> int:
  if stated := _TRIPS.search(line):
    return int(stated[1])
  condition = computations.get(_CONDITION.search(line)[1], '')
  constants = _CONSTANT.findall(condition)
  return int(constants[0]) if len(constants) == 1 and 'direction=LT' in condition else 1


def _operand_bytes(operands: str, computation: str) -> float:
  """Bytes of the operands up to the next parenthesis, from the lines that compute them."""
  total = 0.0
  for name in re.findall(r'%([\w.-]+)', operands.partition(')')[0]):
    found = re.search(rf'%{re.escape(name)} = (.*?) [\w-]+\(', computation)
    total += _result_bytes(found[1], False, '') if found else 0.0
  return total


def _result_bytes(shape: str, is_start: bool, kind: str) -> float:
  """Bytes of the result.

  The tuple of an asynchronous start has the operands, the results and, of a permutation, u32[]s.
  """
  sizes = [
    _BYTES.get(dtype, 4) * math.prod(int(n) for n in dims.split(',') if n)
    for dtype, dims in _SHAPE.findall(shape)
    if not (is_start and (dtype, dims) == ('u32', ''))
  ]
  return sum(sizes[len(sizes) // 2 :] if is_start and kind != 'all-reduce' else sizes)
