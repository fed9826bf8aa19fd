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
_WORDNET_NUMBER = re.compile(r'n\d{8}')


def get_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
  """Prompt templates, each with one '{}'.

  Args:
    templates: a name in PROMPTS, one template, several templates, or the path of a text file with
      one template per line (empty lines do not count).

  Raises:
    ValueError: it is none of these, or a template does not hold '{}' exactly once.
  """
  if isinstance(templates, str):
    if templates in PROMPTS:
      return PROMPTS[templates]
    source = f'templates={templates!r}'
    if PLACE in templates:
      found = (templates,)
    else:
      found = _lines(templates, source, f"one of {', '.join(PROMPTS)}, a text with '{{}}'")
  else:
    source, found = f'templates={templates!r}', tuple(templates)
  for template in found:
    if not isinstance(template, str) or template.count(PLACE) != 1:
      raise ValueError(f"{source}: {template!r} must hold '{{}}' once, where the name goes")
  if not found:
    raise ValueError(f'{source} holds no template')
  return found


def fill(template: str, names: Sequence[str]) -> list[str]:
  """The template filled with each name; other braces stay unchanged."""
  before, _, after = template.partition(PLACE)
  return [f'{before}{name}{after}' for name in names]


def readable_names(
  task: str, own: Sequence[str] | None, given: str | Sequence[str] | None, num_classes: int
) -> tuple[str, ...]:
  """The classes' names as words: underscores become spaces.

  Args:
    task: its name, for messages.
    own: the task's own names; None if it has none.
    given: names to take instead, or the path of a text file with one name per line.
    num_classes: the number of names there must be.

  Raises:
    ValueError: there are no names or not `num_classes`, one is empty, or the task's own names are
      WordNet numbers (TFDS's ImageNet), which mean nothing to a text tower.
  """
  if given is not None:
    source = f'class_names={given!r}' if isinstance(given, str) else 'class_names'
    path_words = 'a tuple of names'
    names = _lines(given, source, path_words) if isinstance(given, str) else tuple(given)
  elif not own:
    raise ValueError(f'{task!r} has no class names: set class_names, names or a file of them')
  else:
    source, names = f'{task!r}', tuple(own)
    if all(map(_WORDNET_NUMBER.fullmatch, names)):
      raise ValueError(
        f'{task!r} names its classes by WordNet numbers ({names[0]} ...), which are no words: set '
        'class_names, names or a file of them in the order of the labels'
      )
  if len(names) != num_classes:
    raise ValueError(f'{source} has {len(names)} names; {task!r} has {num_classes} classes')
  readable = tuple(' '.join(name.replace('_', ' ').split()) for name in names)
  if not all(readable):
    raise ValueError(f'{source}: the name of class {readable.index("")} is empty')
  return readable


def _lines(path: str, source: str, otherwise: str) -> tuple[str, ...]:
  """The lines of a text file that are not empty."""
  try:
    text = Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'{source} must be {otherwise}, or a text file: {error}') from error
  return tuple(line.strip() for line in text.splitlines() if line.strip())
