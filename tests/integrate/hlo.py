"""Reading compiled programs."""

import re

COLLECTIVE = re.compile(
  r' (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\('
)


def collectives(hlo):
  """Names of the collectives of a compiled program: (inside loops, outside)."""
  computations = dict(re.findall(r'^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}', hlo, re.M | re.S))
  inside, pending = set(), re.findall(r'body=%?([\w.-]+)', hlo)
  while pending:
    name = pending.pop()
    if name in computations and name not in inside:
      inside.add(name)
      pending += re.findall(r'(?:body|calls|to_apply)=%?([\w.-]+)', computations[name])
  found = {name: COLLECTIVE.findall(text) for name, text in computations.items()}
  return (
    [op for name in inside for op in found[name]],
    [op for name in found.keys() - inside for op in found[name]],
  )
