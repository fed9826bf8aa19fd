"""Settings of a study's cells: names of gin files, which end in .gin, and bindings, 'NAME = VALUE'.

Files are read before bindings, and what is later in either wins.
"""

from collections.abc import Mapping, Sequence


def files_of(settings: Sequence[str]) -> list[str]:
  return [setting for setting in settings if '=' not in setting]


def bindings_of(settings: Sequence[str]) -> list[str]:
  return [setting for setting in settings if '=' in setting]


def check_label(study: str, where: str, label: str, cells: Mapping[str, Sequence[str]]) -> None:
  """Raises ValueError where there is no such cell."""
  if label not in cells:
    raise ValueError(f'{study}.{where} names the cell {label!r}; the cells are {", ".join(cells)}')


def check_settings(
  study: str,
  shared: Sequence[str],
  cells: Mapping[str, Sequence[str]],
  only: Sequence[str] | None = None,
) -> None:
  """Raises ValueError where settings are no files and bindings, or there is no cell of a label."""
  if not cells:
    raise ValueError(f'{study}.cells is empty; it must be {{label: settings}}')
  for where, settings in {'shared': shared, **cells}.items():
    for setting in [settings] if isinstance(settings, str) else settings:
      if isinstance(settings, str) or ('=' not in setting and not setting.endswith('.gin')):
        raise ValueError(
          f'{study}: {where!r} has the setting {setting!r}; settings are a tuple of gin files that '
          "end in .gin and of bindings 'NAME = VALUE'"
        )
  for label in only or ():
    check_label(study, 'cells', label, cells)
