"""Which installed packages are outside the ranges that this package was tested with."""

import importlib
import importlib.metadata
import re
import sys

# As in the metadata of the wheel: 'flax<0.13,>=0.12.8', or 'grain>=0.2.18; extra == "train"'.
_REQUIREMENT = re.compile(r'([\w.-]+)([^;]*)(.*)')


def check(*packages: str) -> None:
  """Imports packages of the extra `train`, in installed ranges.

  A program that was started as `python -m het_plugin.train` or as het-plugin ends with one sentence
  otherwise.

  Raises:
    ModuleNotFoundError: in other programs, if a package is missing.
  """
  if problem := unsupported():
    _end_a_main(problem)
  for package in packages:
    try:
      importlib.import_module(package)
    except ImportError as error:
      raise missing(error) from error


def missing(error: ImportError) -> ModuleNotFoundError:
  """The error of a package that is missing, with what installs it; a command ends with it."""
  message = f"{error.msg}: pip install 'het_plugin[train]'"
  _end_a_main(message)
  return ModuleNotFoundError(message, name=error.name)


def _end_a_main(message: str) -> None:
  """Ends a program that was started as `python -m het_plugin.train`; returns in others."""
  main = getattr(sys.modules['__main__'], '__spec__', None)
  if main is not None and main.name.startswith('het_plugin.'):
    print(f'Error: {message}', file=sys.stderr)
    sys.exit(2)


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
