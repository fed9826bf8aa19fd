"""The ablations of this package by name, and those of a user's gin file."""

from collections.abc import Sequence
from pathlib import Path

import gin
from het_plugin import reporting
from het_plugin.config import parsing
from het_plugin.experiments import runs as runs_lib

FOLDER = 'het_plugin/gin/runs/ablations/'
STUDY = 'STUDY'  # the macro that a file binds


def names() -> list[str]:
  """Names of the ablations of this package."""
  return sorted(path.stem for path in Path(parsing.resolve(FOLDER)).glob('*.gin'))


def gin_file(name: str) -> str:
  """The file of an ablation by its name, or the file that the name is.

  Raises:
    ValueError: neither.
  """
  if name in names():
    return f'{FOLDER}{name}.gin'
  if name.endswith('.gin'):
    return name
  raise ValueError(
    f'{name!r} is no ablation: choose from {", ".join(names())}, or name a file that ends in .gin'
  )


def study(name: str, bindings: Sequence[str] = (), search_paths: Sequence[str] = ('.',)):
  """What the ablation's file binds; its own bindings come after the file.

  Raises:
    ValueError: no such ablation, or a setting of it is wrong.
  """
  parsing.parse_config([gin_file(name)], bindings, search_paths)
  try:
    gin.query_parameter(f'%{STUDY}')
  except ValueError:
    raise ValueError(f'{name} binds no {STUDY}, such as {STUDY} = @Ablation()') from None
  return runs_lib.called(STUDY)


def split_bindings(bindings: Sequence[str]) -> tuple[list[str], list[str]]:
  """The bindings of studies, and those of runs."""
  own = [binding for binding in bindings if binding.startswith(('Ablation.', 'Flops.'))]
  return own, [binding for binding in bindings if binding not in own]


def listing() -> str:
  """The ablations of this package, a line each."""
  lines = [[name, study(name).title] for name in names()]
  return reporting.plain_table(reporting.Table('Ablations', ['name', 'what it compares'], lines))
