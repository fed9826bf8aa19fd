"""Whether classes whose logits go up and down together look the same."""

from collections.abc import Sequence

import numpy as np

from het_plugin.measures import uncertainty


def look_alike_rate(
  labels: Sequence[int],
  with_label: Sequence[np.ndarray],
  look_alikes: Sequence[frozenset[int]],
) -> dict[str, float | int | None]:
  """How often the class that correlates most with the true class looks the same.

  Args:
    labels: [N] true classes.
    with_label: [N] correlations [K] with the true class. If several classes correlate most, such as
      the classes of one bucket of HET-H, the share of look-alikes among them counts.
    look_alikes: [K] sets of classes (`TaskInfo.look_alikes`); images of classes without any do not
      count.

  Returns:
    'rate' and its standard error 'stderr'; 'chance', the rate for a random one of the other K - 1
    classes; 'num_examples', the images that count. Rates are None if there are none.
  """
  hits = []
  chances = []
  for label, correlation in zip(labels, with_label, strict=True):
    if look_alikes[label]:
      others = np.array(correlation, np.float64)
      others[label] = -np.inf
      # A tolerance, because products of equal factors may round differently.
      most = np.flatnonzero(others >= np.max(others) - 1e-6)
      hits.append(np.mean([int(k) in look_alikes[label] for k in most]))
      chances.append(len(look_alikes[label]) / (len(others) - 1))
  if not hits:
    return {'rate': None, 'stderr': None, 'chance': None, 'num_examples': 0}
  return {
    'rate': float(np.mean(hits)),
    'stderr': uncertainty.stderr(np.array(hits)),
    'chance': float(np.mean(chances)),
    'num_examples': len(hits),
  }
