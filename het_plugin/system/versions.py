"""Which installed packages are outside the ranges that this package was tested with."""

import importlib.metadata
import re

# As in the metadata of the wheel: 'flax<0.13,>=0.12.8', or 'grain>=0.2.18; extra == "train"'.
_REQUIREMENT = re.compile(r'([\w.-]+)([^;]*)(.*)')


def unsupported() -> str:
  """One sentence on the installed packages that are too old or too new, '' if there are none.

  The ranges of the core and of the extra `train` count. A package may also be missing.
  """
  found = []
  wanted = []
  for requirement in _of(importlib.metadata.requires, 'het_plugin') or ():
    parts = _REQUIREMENT.match(requirement)
    assert parts is not None, requirement
    name, bounds, marker = parts.groups()
    if marker and 'train' not in marker:
      continue  # before its metadata is read, which takes a millisecond or more
    version = _of(importlib.metadata.version, name)
    if version is None or _within(version, bounds):
      continue
    found.append(f'{name} {version}')
    wanted.append(f"'{name}{bounds}'")
  if not found:
    return ''
  return f'het_plugin does not support {", ".join(found)}: pip install {" ".join(wanted)}'


def _of(find, name: str):
  """What importlib.metadata finds of a package; None if it is not installed."""
  try:
    return find(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _within(version: str, bounds: str) -> bool:
  for relation, bound in re.findall(r'(>=|<)([\d.]+)', bounds):
    if (_numbers(version) < _numbers(bound)) == (relation == '>='):
      return False
  return True


def _numbers(version: str) -> list[int]:
  """[0, 12, 0, 1] of 0.12.0.1 and of 0.12.0.1rc2."""
  return [int(number) for number in re.findall(r'^[\d.]*\d', version)[0].split('.')]
