"""Prompts about a class: templates that its name fills, and names of classes."""

import re
from collections.abc import Sequence
from pathlib import Path

PLACE = '{}'  # stands for the name
PROMPTS: dict[str, tuple[str, ...]] = {
  'none': ('{}',),
  'photo': ('a photo of a {}.',),
  # Views, qualities and media of images; the embedding of a class is the mean over these.
  'ensemble': (
    '{}',
    'a photo of a {}.',
    'a close-up picture of a {}.',
    'a {} seen from afar.',
    'a dark, grainy photo of a {}.',
    'a drawing of a {}.',
    'an image that shows several of {}.',
  ),
}


def get_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
  """Prompt templates, each with one '{}', from a name in PROMPTS, one template, several templates,
  or the path of a text file with one template per line (empty lines do not count).
  """
  found = templates
  if isinstance(templates, str):
    if templates in PROMPTS:
      return PROMPTS[templates]
    what = f"templates={templates!r} must be one of {', '.join(PROMPTS)}, a text with '{{}}'"
    found = (templates,) if PLACE in templates else _lines(templates, what)
  if not isinstance(found, Sequence):
    raise ValueError(f'templates={templates!r} must be a name, a template, or several of them')
  if not found:
    raise ValueError(f'templates={templates!r} holds no template')
  for template in found:
    if not isinstance(template, str) or template.count(PLACE) != 1:
      what = f"{template!r} must hold '{{}}' once, where the name goes"
      raise ValueError(f'templates={templates!r}: {what}')
  return tuple(found)


def fill(template: str, names: Sequence[str]) -> list[str]:
  """The template filled with each name; other braces stay unchanged."""
  return [template.replace(PLACE, name) for name in names]


def readable_names(
  task: str, own: Sequence[str] | None, given: str | Sequence[str] | None, num_classes: int
) -> tuple[str, ...]:
  """The names of the classes as words: underscores become spaces.

  They are the `given` ones, which may be the path of a text file with one name per line, or else
  the task's `own`, unless these are WordNet numbers (TFDS's ImageNet), which mean nothing to a text
  tower.
  """
  source = repr(task) if given is None else 'class_names'
  names = own if given is None else given
  if isinstance(names, str):
    names = _lines(names, f'class_names={names!r} must be a tuple of names')
  elif not names or (given is None and all(re.fullmatch(r'n\d{8}', name) for name in names)):
    what = f'WordNet numbers ({names[0]} ...), which are not words' if names else 'no class names'
    raise ValueError(f'{task!r} has {what}: set class_names, names or a file of them by label')
  if wrong := [name for name in names if not isinstance(name, str)]:
    raise ValueError(f'{source}: the name {wrong[0]!r} must be a text')
  if len(names) != num_classes:
    raise ValueError(f'{source} has {len(names)} names; {task!r} has {num_classes} classes')
  readable = tuple(' '.join(name.replace('_', ' ').split()) for name in names)
  if not all(readable):
    raise ValueError(f'{source}: the name of class {readable.index("")} is empty')
  return readable


def _lines(path: str, what: str) -> tuple[str, ...]:
  """The lines of a text file that are not empty; `what` begins the error."""
  try:
    text = Path(path).read_text(encoding='utf-8-sig')
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'{what}, or a text file: {error}') from error
  return tuple(line.strip() for line in text.splitlines() if line.strip())
