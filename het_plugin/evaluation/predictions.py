"""Predictive distributions of a split, computed over the mesh, and their files.

het_plugin writes .npz files with the arrays

    log_prob          float32 [N, K]
    label             int32 [N], or [N, L] padded with -1
    index             int64 [N], distinct example ids
    link              'softmax' or 'sigmoid'
    class_name        [K] strings, if they are known
    expected_entropy  float32 [N], of sampled heteroscedastic heads
    nll               float32 [N], of the sigmoid link
    provenance        JSON: the checkpoint, task and split they come from

Files made elsewhere need a label and exactly one of `log_prob`, `prob` and `logits` [N, K]. With a
softmax link, the probabilities of a row must sum to 1 within 0.001 (0.01 in half precision); logits
are normalised. With link = 'sigmoid', each class is on with its own probability.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from scipy import special

from het_plugin import weights
from het_plugin.data.representations import example_ids, label_rows, one_of, reading
from het_plugin.evaluation.extraction import Batches, PerExample, PlacedModel

PyTree = Any

LINKS = ('softmax', 'sigmoid')
VALUE_NAMES = ('log_prob', 'prob', 'logits')
LABEL_NAMES = ('label', 'labels')
_OPTIONAL = ('expected_entropy', 'nll')
_SUM_TOLERANCE = 1e-3
_HALF_SUM_TOLERANCE = 1e-2  # half precision rounds a log-probability of -10 by 4e-3


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
  """Predictive distributions of N examples over K classes.

  Attributes:
    log_prob: float32 or float64 [N, K], at most 0: log p(k | x) with a softmax, log p(y_k = 1 | x)
      per class with a sigmoid.
    labels: int32 [N, L], padded with -1.
    index: int64 [N], distinct example ids.
    link: 'softmax' or 'sigmoid'.
    class_names: names of the K classes; None if unknown.
    expected_entropy: float32 [N] in nats (`Integrator.expected_entropy`); None without noise.
    nll: float32 [N] in nats, for a sigmoid link, from the model itself, because log_prob does not
      determine it exactly; None if it is unknown.
    provenance: origin of the predictions, as JSON values.
  """

  log_prob: np.ndarray
  labels: np.ndarray
  index: np.ndarray
  link: str = 'softmax'
  class_names: tuple[str, ...] | None = None
  expected_entropy: np.ndarray | None = None
  nll: np.ndarray | None = None
  provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return len(self.log_prob)

  @property
  def label(self) -> np.ndarray:
    """The label of each example, int32 [N], for a softmax link: of several people's, the most
    frequent one, and the smallest of equally frequent ones.
    """
    if self.labels.shape[1] == 1:
      return self.labels[:, 0]
    same = self.labels[:, :, None] == self.labels[:, None, :]  # [N, L, L]
    votes = np.where(self.labels >= 0, same.sum(axis=2), 0)
    winners = np.where(
      votes == votes.max(axis=1, keepdims=True), self.labels, np.iinfo(np.int32).max
    )
    return winners.min(axis=1)

  @property
  def label_log_prob(self) -> np.ndarray:
    """log p(y | x), [N], for a softmax link."""
    return np.take_along_axis(self.log_prob, self.label[:, None], axis=1)[:, 0]

  def rows(self, rows: slice | np.ndarray) -> 'Predictions':
    """The predictions of some examples."""
    return dataclasses.replace(
      self, **{name: x[rows] for name in _PER_EXAMPLE if (x := getattr(self, name)) is not None}
    )


_PER_EXAMPLE = ('log_prob', 'labels', 'index', 'expected_entropy', 'nll')


def check_has_head(checkpoint: str) -> None:
  """Raises ValueError for a published file, which can be represented but predicts no classes."""
  if weights.is_weights_file(checkpoint):
    raise ValueError(
      f'--checkpoint={checkpoint} is a published file, whose head is not trained: give the '
      'directory of a run'
    )


class Predictor:
  """Maps batches to predictive distributions by the model's evaluation integrator.

  Compiles once per batch shape. The model has `predictive(params, batch)` and `head.link`.
  """

  def __init__(self, run: PlacedModel):
    # Classes are sharded until the log-probabilities of a batch are gathered here.
    self._rows = PerExample(run.model.predictive, run)
    self._link = run.model.head.link

  def __call__(
    self, params: PyTree, batches: Batches, batch_size: int, max_examples: int | None = None
  ) -> Iterator[Predictions]:
    """Yields the predictions batch by batch; arguments are as for `PerExample`."""
    for rows in self._rows(params, batches, batch_size, max_examples):
      if len(rows['index']):
        yield Predictions(
          log_prob=np.minimum(rows['log_prob'], 0.0),  # a mean over samples may round to above 0
          labels=rows['label'],
          index=rows['index'].astype(np.int64),
          link=self._link,
          expected_entropy=rows.get('expected_entropy'),
          nll=rows.get('nll'),
        )


def concatenate(parts: Sequence[Predictions]) -> Predictions:
  """Joins the parts of a split."""
  joined = {
    name: np.concatenate([getattr(part, name) for part in parts])
    for name in _PER_EXAMPLE
    if getattr(parts[0], name) is not None
  }
  return dataclasses.replace(parts[0], **joined)


def write_predictions(path: epath.PathLike, predictions: Predictions) -> None:
  """Writes an .npz file."""
  path = epath.Path(path)
  if path.suffix != '.npz':
    raise ValueError(f'predictions file {path} must end in .npz')
  labels = predictions.labels.astype(np.int32)
  arrays = {
    'log_prob': predictions.log_prob,
    'label': labels[:, 0] if labels.shape[1] == 1 else labels,
    'index': predictions.index.astype(np.int64),
    'link': np.array(predictions.link),
    'class_name': None if predictions.class_names is None else np.array(predictions.class_names),
    'expected_entropy': predictions.expected_entropy,
    'nll': predictions.nll,
    'provenance': np.array(json.dumps(dict(predictions.provenance))),
  }
  with weights.replacing(path) as unfinished, unfinished.open('wb') as stream:
    np.savez(stream, **{name: x for name, x in arrays.items() if x is not None})


def read_predictions(path: str) -> Predictions:
  """Reads a file; what is wrong with it is a ValueError that names it."""
  with reading(path):
    if not path.endswith('.npz'):
      raise ValueError('predictions must be in a file that ends in .npz')
    with epath.Path(path).open('rb') as stream, np.load(stream, allow_pickle=False) as file:
      # Not `weights.read_arrays`, which narrows to float32: that has no probability below 1e-45.
      return _parse({name: file[name] for name in file.files})


def _parse(arrays: Mapping[str, np.ndarray]) -> Predictions:
  link = str(arrays.get('link', LINKS[0]))
  if link not in LINKS:
    raise ValueError(f'link is {link!r}; it must be one of {", ".join(LINKS)}')
  name, values = one_of(arrays, VALUE_NAMES)
  if values.dtype.kind != 'f' or values.ndim != 2 or not values.size:
    raise ValueError(
      f'{name} is {values.dtype} {list(values.shape)}; it must be floating point [N, K]'
    )
  num_examples, num_classes = values.shape
  for column in ('class_name', *_OPTIONAL):
    size = num_classes if column == 'class_name' else num_examples
    if column in arrays and arrays[column].shape != (size,):
      raise ValueError(f'{column} is {list(arrays[column].shape)}; it must be [{size}]')
    if column in arrays and column in _OPTIONAL and not np.isfinite(arrays[column]).all():
      raise ValueError(f'{column} has values that are not finite')
  read = Predictions(
    _log_prob(name, values, link),
    label_rows(one_of(arrays, LABEL_NAMES)[1], num_examples),
    example_ids(arrays.get('index'), num_examples),
    link=link,
    class_names=tuple(map(str, arrays['class_name'])) if 'class_name' in arrays else None,
    expected_entropy=arrays.get('expected_entropy'),
    nll=arrays.get('nll') if link == 'sigmoid' else None,
    provenance=json.loads(str(arrays['provenance'])) if 'provenance' in arrays else {},
  )
  check(read)
  return read


def check(predictions: Predictions) -> None:
  """Raises ValueError if a label is out of range or a softmax example has none."""
  labels, num_classes = predictions.labels, predictions.log_prob.shape[1]
  largest, count = labels.max(axis=1), (labels >= 0).sum(axis=1)
  for row in np.flatnonzero(largest >= num_classes)[:1]:
    raise ValueError(
      f'label {int(largest[row])} of example {int(predictions.index[row])} is out of range; '
      f'labels are 0 .. {num_classes - 1}'
    )
  for row in np.flatnonzero(count == 0)[: predictions.link == 'softmax']:
    raise ValueError(
      f'example {int(predictions.index[row])} has no label; under a softmax each must have one'
    )


def _log_prob(name: str, values: np.ndarray, link: str) -> np.ndarray:
  """Log-probabilities [N, K]: given ones unchanged, others computed in float64."""
  tolerance = _SUM_TOLERANCE if values.dtype.itemsize >= 4 else _HALF_SUM_TOLERANCE
  if name == 'logits':
    if not np.isfinite(values).all():
      raise ValueError('logits has values that are not finite')
    values = values.astype(np.float64)
    return special.log_softmax(values, axis=1) if link == 'softmax' else special.log_expit(values)
  if name == 'prob':
    if not ((values >= 0) & (values <= 1 + tolerance)).all():
      raise ValueError('prob has values outside [0, 1]')
    with np.errstate(divide='ignore'):  # a probability of 0 is valid: its log is -inf
      log_prob = np.log(values.astype(np.float64))
  else:
    log_prob = values if values.dtype.itemsize >= 4 else values.astype(np.float32)
    if not (log_prob <= tolerance).all():
      raise ValueError('log_prob has values above 0, or NaNs')
  if link == 'softmax':
    total = np.exp(special.logsumexp(log_prob, axis=1))
    if (wrong := np.abs(total - 1) > tolerance).any():
      row = int(np.flatnonzero(wrong)[0])
      raise ValueError(
        f'the probabilities of row {row} sum to {total[row]:.4g} instead of 1 (an array '
        "link = 'sigmoid' says that classes are independent)"
      )
  return np.minimum(log_prob, 0.0)
