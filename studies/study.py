"""Names of the ablations, settings of their cells, and requests of the command line.

Settings are names of gin files, which end in .gin, and bindings, 'NAME = VALUE'. Files are read
before bindings; later ones win.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
from het_plugin import reporting
from het_plugin.config import parsing, registry
from het_plugin.experiments import trainings
from studies import CONFIGURABLES

STUDY = 'STUDY'  # the macro that a file binds
CHECKOUT = Path(__file__).resolve().parents[1]


def files() -> dict[str, str]:
  """{name: gin file} of the ablations, relative to the checkout."""
  found = sorted((CHECKOUT / 'studies').glob('*/*.gin'), key=lambda path: path.stem)
  return {path.stem: str(path.relative_to(CHECKOUT)) for path in found}


def names() -> list[str]:
  """Names of the ablations."""
  return list(files())


def gin_file(name: str) -> str:
  """The gin file of an ablation, or `name` itself; ValueError if it is neither."""
  if name in names():
    return files()[name]
  if name.endswith('.gin'):
    return name
  raise ValueError(
    f'{name!r} is not an ablation: choose from {", ".join(names())}, or name a .gin file'
  )


def load(name: str, bindings: Sequence[str] = (), search_paths: Sequence[str] = ('.',)) -> Any:
  """The study that a file binds; `bindings` come after the file.

  Raises:
    ValueError: there is no such ablation, one of its settings is wrong, or a binding is of none of
      its parts.
  """
  registry.register_table('studies', CONFIGURABLES)
  parsing.parse_config([gin_file(name)], bindings, search_paths)
  try:
    gin.query_parameter(f'%{STUDY}')
  except ValueError:
    raise ValueError(f'{name} binds no {STUDY}, such as {STUDY} = @Ablation()') from None
  study = trainings.called(STUDY)
  read = {type(part).__name__ for part in (study, getattr(study, 'analysis', None))}
  if unread := [binding for binding in bindings if binding.partition('.')[0] not in read]:
    raise ValueError(
      f'--gin.{unread[0]} has no effect: {name} has no {unread[0].partition(".")[0]}'
    )
  return study


def check_folder() -> None:
  """Raises ValueError outside the checkout, from which gin files of studies have their names."""
  if Path.cwd().resolve() != CHECKOUT:
    raise ValueError(f'studies run in their checkout: cd {CHECKOUT}')


def split_bindings(bindings: Sequence[str]) -> tuple[list[str], list[str]]:
  """The bindings of studies and of their analyses, and the bindings of runs."""
  of_studies = {name for names in CONFIGURABLES.values() for name in names}
  own = [binding for binding in bindings if binding.partition('.')[0] in of_studies]
  return own, [binding for binding in bindings if binding not in own]


def listing() -> str:
  """The ablations, one line each."""
  lines = [[name, load(name).title] for name in names()]
  return reporting.plain_table(reporting.Table('Ablations', ['name', 'what it compares'], lines))


@dataclasses.dataclass(frozen=True)
class Request:
  """The settings of a study on the command line.

  `gin_bindings` come after the bindings of every cell. `seeds` replace the study's own (None keeps
  them), and `cells` are the labels of the cells to run (None for all).
  """

  output_dir: Path
  gin_bindings: Sequence[str] = ()
  gin_search_paths: Sequence[str] = ('.',)
  seeds: Sequence[int] | None = None
  cells: Sequence[str] | None = None

  def run_of(self, settings: Sequence[str]) -> trainings.Training:
    """The run of a cell: its settings, then the bindings of the command line."""
    files = [setting for setting in settings if '=' not in setting]
    own = [setting for setting in settings if '=' in setting]
    return trainings.Training(files, [*own, *self.gin_bindings], self.gin_search_paths)

  def check_used(self, shared: Sequence[str], cells: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError if no cell uses a binding of the command line."""
    runs = [self.run_of([*shared, *settings]) for settings in cells.values()]
    trainings.check_used(self.gin_bindings, runs, self.output_dir)


def check_labels(where: str, labels: Iterable[str], cells: Mapping[str, Sequence[str]]) -> None:
  """Raises ValueError if a label names no cell."""
  for label in labels:
    if label not in cells:
      raise ValueError(f'{where} names the cell {label!r}; the cells are {", ".join(cells)}')


def check_settings(study: str, shared: Sequence[str], cells: Mapping[str, Sequence[str]]) -> None:
  """Raises ValueError if settings are not files and bindings."""
  if not cells:
    raise ValueError(f'{study}.cells is empty; it must be {{label: settings}}')
  for where, settings in {'shared': shared, **cells}.items():
    for setting in [settings] if isinstance(settings, str) else settings:
      if isinstance(settings, str) or ('=' not in setting and not setting.endswith('.gin')):
        raise ValueError(
          f'{study}: {where!r} has the setting {setting!r}; settings are a tuple of gin files that '
          "end in .gin and of bindings 'NAME = VALUE'"
        )
