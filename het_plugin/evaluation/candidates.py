"""Files of several checkpoints that are candidates for one task, with the same examples."""

import dataclasses
import os
from collections.abc import Iterator, Sequence

import numpy as np

from het_plugin import rows as rows_lib
from het_plugin import runs
from het_plugin.evaluation.names import choose_names
from het_plugin.measures import votes
from het_plugin.rows import Rows


def split_sources(texts: Sequence[str]) -> tuple[str, ...]:
  """Splits ['a.npz,X.npy,Y.npy'] into ('a.npz', 'X.npy,Y.npy'): labels follow their .npy file.

  A run whose folder has a comma in its name, as `finetune` makes them, stays whole.
  """
  sources = []
  for text in texts:
    parts = iter([text] if os.path.exists(text) else text.split(','))
    for part in parts:
      labels = next(parts, None) if part.endswith('.npy') else None
      sources.append(part if labels is None else f'{part},{labels}')
  return tuple(sources)


def candidate_names(
  names: Sequence[str] | None, sources: Sequence[str], test: Sequence[str] = (), flag: str = 'train'
) -> list[str]:
  """`choose_names` for the candidates, whose sources the flag `flag` gives.

  Raises:
    ValueError: there are no sources, two are equal, or the number of names or of test files is
      not the number of sources.
  """
  if not sources:
    raise ValueError(f'--{flag} is not set: give it a file for each candidate')
  if len(set(sources)) != len(sources):
    twice = next(source for source in sources if list(sources).count(source) > 1)
    raise ValueError(f'--{flag} names {twice} twice; candidates must differ')
  if test and len(test) != len(sources):
    raise ValueError(
      f'--test has {len(test)} files and --{flag} {len(sources)}: give one per candidate'
    )
  return choose_names(names, sources)


def number_to_keep(keep: str, names: Sequence[str]) -> int:
  """The number of candidates to keep, from a number or 'all'; ValueError for another text."""
  choices = {'all': len(names)} | {str(n): n for n in range(1, len(names) + 1)}
  if keep not in choices:
    raise ValueError(f"--keep={keep} must be in 1 .. {len(names)}, the candidates, or 'all'")
  return choices[keep]


def check_representations(train: Sequence[str], test: Sequence[str] = ()) -> tuple[str, ...] | None:
  """Reads every file, one per candidate and split, before anything is computed.

  Returns the classes of the first training file, whose order is that of all candidates.

  Raises:
    ValueError: a file is wrong, candidates have different examples, or two files of a candidate
      are one, have different classes or numbers of features or come from different checkpoints or
      layers.
  """
  for pair in zip(train, test, strict=True) if test else ():
    runs.sources.different(pair)
  meanings = []
  for split, sources in (('train', train), (None, test)):
    first: Rows | None = None
    for i, source in enumerate(sources):
      read = runs.sources.open_source(source).rows(split).ordered()
      if split:
        meanings.append(read.meaning)
      else:
        read = rows_lib.paired((train[i], source), meanings[i], read)
      read = read.in_order(meanings[0]['classes'])
      first = first or read.without('features')
      _check_same(sources[0], source, first, read)
  return meanings[0]['classes']


def read_softmax_predictions(source: str, split: str | None = None) -> Rows:
  """Reads predictions ascending by example id; of several labels the most frequent one is kept."""
  read = runs.sources.open_source(source).rows(split, ('log_prob',))
  if read.link != 'softmax':
    raise ValueError(f"{source} has link = '{read.link}'; an ensemble needs softmax predictions")
  label = votes.majority(read.labels, read.label_weight)
  return dataclasses.replace(read, labels=label[:, None], label_weight=None).ordered()


def same_predictions(sources: Sequence[str], split: str | None = None) -> Iterator[Rows]:
  """`read_softmax_predictions` of one file after another, all for the same examples and classes.

  Classes have the order of the first file.
  """
  first: Rows | None = None
  num_classes = 0
  for source in sources:
    read = read_softmax_predictions(source, split)
    if first is None:
      first = read.without('log_prob')
      num_classes = read.log_prob.shape[1]
    read = read.in_order(first.class_names)
    _check_same(sources[0], source, first, read)
    if (classes := read.log_prob.shape[1]) != num_classes:
      raise ValueError(f'{source} has {classes} classes and {sources[0]} {num_classes}')
    yield read


def _check_same(first_source: str, source: str, first: Rows, other: Rows) -> None:
  """Compares the examples and labels of rows ascending by id."""
  if not np.array_equal(first.index, other.index):
    raise ValueError(
      f'{source} and {first_source} have different examples: {len(other)} and {len(first)}, '
      f'with {len(np.intersect1d(first.index, other.index))} in both'
    )
  if not np.array_equal(first.labels, other.labels):
    raise ValueError(f'{source} and {first_source} have different labels for the same examples')
