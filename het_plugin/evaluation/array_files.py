"""What the files of representations and of predictions share: labels, example ids, errors."""

import contextlib
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
  """Raises whatever goes wrong inside as a ValueError of one sentence that names the file.

  A damaged file makes zipfile, zlib, numpy, json and safetensors raise errors of many types.
  """
  try:
    yield
  except Exception as error:
    message = ' '.join(str(error).split()) or type(error).__name__
    raise ValueError(message if path in message else f'{path}: {message}') from error


def label_rows(labels: np.ndarray, num_examples: int) -> np.ndarray:
  """Labels [N] or [N, L] of any integer type as int32 [N, L].

  Raises:
    ValueError: another shape or type, or a label above the range of int32.
  """
  if labels.dtype.kind not in 'iu' or labels.ndim not in (1, 2) or len(labels) != num_examples:
    raise ValueError(
      f'labels are {labels.dtype} {list(labels.shape)}; they must be integers [N] or [N, L] with '
      f'N = {num_examples}, the number of examples'
    )
  if labels.size and labels.max() > np.iinfo(np.int32).max:
    raise ValueError(f'label {labels.max()} is out of range; labels are class numbers')
  return (labels[:, None] if labels.ndim == 1 else labels).astype(np.int32)


def example_ids(index: np.ndarray | None, num_examples: int) -> np.ndarray:
  """Example ids as int64 [N]; None counts from 0.

  Raises:
    ValueError: another shape or type, or an id that occurs twice.
  """
  if index is None:
    return np.arange(num_examples)
  if index.shape != (num_examples,) or index.dtype.kind not in 'iu':
    raise ValueError(
      f'index is {index.dtype} {list(index.shape)}; it must be integers [{num_examples}]'
    )
  if len(np.unique(index)) != num_examples:
    raise ValueError('index must give each example an id of its own')
  return index.astype(np.int64)
