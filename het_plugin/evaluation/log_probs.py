"""Files of log-probabilities: .npz or .safetensors with the arrays

log_prob    float [N, K], log-probabilities of the classes
label       int [N]
index       int [N], distinct example ids; the row numbers where it is missing
"""

import dataclasses

import numpy as np
import scipy.special

from het_plugin import weights

_TOLERANCE = 1e-2  # on log sum p; half precision rounds a log-probability of -10 by 4e-3


@dataclasses.dataclass(frozen=True, eq=False)
class LogProbs:
  """The predictions for a split, ascending by example id.

  Attributes:
    log_prob: float [N, K]; -inf is p = 0.
    label: int64 [N].
    index: int64 [N], distinct example ids.
  """

  log_prob: np.ndarray
  label: np.ndarray
  index: np.ndarray

  @property
  def label_log_prob(self) -> np.ndarray:
    """log p(y_n), float [N]."""
    return np.take_along_axis(self.log_prob, self.label[:, None], axis=1)[:, 0]


def read_log_probs(path: str) -> LogProbs:
  """Reads a file.

  Raises:
    ValueError: a missing or wrong file, or values that are no log-probabilities, labels or ids; one
      sentence that names the file.
  """
  arrays = weights.read_arrays(path)
  if missing := [name for name in ('log_prob', 'label') if name not in arrays]:
    raise ValueError(
      f'{path} has no array {" and no ".join(missing)}; it has {", ".join(arrays) or "none"}'
    )
  log_prob, label = arrays['log_prob'], arrays['label']
  if log_prob.dtype.kind != 'f' or log_prob.ndim != 2 or not log_prob.size:
    raise ValueError(
      f'{path}: log_prob is {log_prob.dtype} {list(log_prob.shape)}; it must be floating point '
      '[N, K], not empty'
    )
  index = arrays.get('index', np.arange(len(log_prob)))
  for name, x in (('label', label), ('index', index)):
    if x.dtype.kind not in 'iu' or x.shape != log_prob.shape[:1]:
      raise ValueError(
        f'{path}: {name} is {x.dtype} {list(x.shape)}; it must be integers [{len(log_prob)}]'
      )
  _check_values(path, log_prob, label, index)
  order = np.argsort(index, kind='stable')
  return LogProbs(log_prob[order], label[order].astype(np.int64), index[order].astype(np.int64))


def _check_values(path: str, log_prob: np.ndarray, label: np.ndarray, index: np.ndarray) -> None:
  num_classes = log_prob.shape[1]
  if np.isnan(log_prob).any():
    rows = int(np.isnan(log_prob).any(axis=1).sum())
    raise ValueError(f'{path}: log_prob has NaNs in {rows} rows')
  log_sum = scipy.special.logsumexp(log_prob, axis=1)
  if (wrong := ~(np.abs(log_sum) <= _TOLERANCE)).any():
    row = int(np.flatnonzero(wrong)[0])
    raise ValueError(
      f'{path}: the probabilities of row {row} sum to exp({log_sum[row]:.4g}), not to 1; log_prob '
      'must hold log-probabilities'
    )
  if (wrong := (label < 0) | (label >= num_classes)).any():
    row = int(np.flatnonzero(wrong)[0])
    raise ValueError(
      f'{path}: label {int(label[row])} of row {row} is out of range; labels are 0 .. '
      f'{num_classes - 1}'
    )
  if len(np.unique(index)) != len(index):
    raise ValueError(f'{path}: index must give each row an example id of its own')
