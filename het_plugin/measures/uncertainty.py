"""Metrics of predictive uncertainty: likelihood, calibration, selective prediction, detection of
unknown inputs.

N examples, K classes, p the predictive distribution, y the label. Everything is computed in float64
from log-probabilities, through a few numbers per example, so a split can come in batches. Undefined
values are None, such as the standard error of one example.

    NLL          -log p(y), nats; sigmoid: the binary cross-entropies summed over the classes
    precision@k  softmax: y is among the k most probable classes; sigmoid: the share of the k most
                 probable classes that are labels
    ranking AP   sigmoid only: label ranking average precision
    Brier        sum_k (p_k - [y = k])^2, in [0, 2] under softmax (Brier 1950)
    ECE          Guo et al. 2017, https://arxiv.org/abs/1706.04599, eq. 3, 15 bins of equal width
    adaptive ECE 15 bins of equal numbers of examples (Nixon et al. 2019,
                 https://arxiv.org/abs/1904.01685)
    AURC, E-AURC mean error rate of the n most confident examples, n = 1 .. N (Geifman and El-Yaniv
                 2017, https://arxiv.org/abs/1705.08500), less that of the best order (Geifman et
                 al. 2019, https://arxiv.org/abs/1805.08206)
    FPR@95       the share of unknown inputs that pass a threshold that 95% of the known inputs pass
                 (Liang et al. 2018, https://arxiv.org/abs/1706.02690)

The confidence is the probability of the most probable class, which is right if it is a label. Equal
probabilities and equal confidences count as if their order were random (`votes.top_shares`), and
half in an AUROC.

Under a softmax, several labels of an example are votes or a distribution. Each measure is then its
mean over a label drawn from their shares t (`votes.shares`), as in the evaluation of a training:
the NLL is -sum_k t_k log p_k, and a class is right with probability t_k. The Brier score is
sum_k (p_k - t_k)^2. For AUROC, an answer is wrong if fewer than half of the labels agree with it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from scipy import stats
from sklearn import metrics

from het_plugin.measures import votes

NUM_BINS = 15  # M, as in `models.metrics`
_BLOCK = 2**22  # float64 elements in work at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Uncertainty:
  """Scores that do not need labels, float64 [N]."""

  log_confidence: np.ndarray  # log p of the most probable class
  entropy: np.ndarray  # nats; sigmoid: summed over the classes
  # Nats, of label and noise: the entropy minus that expected given the noise. None without noise.
  mutual_information: np.ndarray | None

  def scores(self) -> dict[str, np.ndarray]:
    """{name: score [N]}; a larger score means that the model knows less."""
    scores = {'max_prob': -self.log_confidence, 'entropy': self.entropy}
    if self.mutual_information is not None:
      scores['mutual_information'] = self.mutual_information
    return scores


@dataclasses.dataclass(frozen=True, eq=False)
class Reliability:
  """A reliability diagram: count, mean confidence and accuracy [M], both NaN for empty bins."""

  count: np.ndarray
  confidence: np.ndarray
  accuracy: np.ndarray

  @property
  def ece(self) -> float:
    """Expected calibration error (Guo et al. 2017, https://arxiv.org/abs/1706.04599, eq. 3).

    This is the gap between confidence and accuracy, averaged with the counts as weights.
    """
    gap = np.where(self.count > 0, np.abs(self.accuracy - self.confidence), 0.0)
    return float((self.count * gap).sum() / self.count.sum())


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleScores:
  """The numbers per example from which the metrics of a split are computed."""

  index: np.ndarray  # int64 [N]
  labels: np.ndarray  # int32 [N, L]
  shares: np.ndarray | None  # float64 [N, L], of the labels; None under sigmoid
  nll: np.ndarray  # float64 [N]
  brier: np.ndarray  # float64 [N]
  precision: dict[int, np.ndarray]  # {k: float64 [N]}
  correct: np.ndarray  # float64 [N], the share of the labels that are the most probable class
  ranking_ap: np.ndarray | None  # float64 [N]; None under softmax
  uncertainty: Uncertainty

  def reliability(self) -> Reliability:
    """The diagram of the confidences in 15 bins of equal width."""
    return reliability(np.exp(self.uncertainty.log_confidence), self.correct)


_Scores = TypeVar('_Scores', ExampleScores, Uncertainty)


def uncertainty(
  log_prob: np.ndarray, link: str = 'softmax', expected_entropy: np.ndarray | None = None
) -> Uncertainty:
  """The scores of predictions that do not need labels.

  Args:
    log_prob: float [N, K], at most 0: log p(k | x) with a softmax, log p(y_k = 1 | x) per class
      with a sigmoid.
    link: 'softmax' or 'sigmoid'.
    expected_entropy: float [N], nats: the entropy expected given the noise
      (`Integrator.expected_entropy`); None without noise.

  Returns:
    Arrays [N], in nats.
  """
  parts = [
    _uncertainty(log_p, link, None if expected_entropy is None else expected_entropy[rows])
    for rows, log_p in blocks(log_prob)
  ]
  return concatenate(parts)


def score_examples(
  log_prob: np.ndarray,
  labels: np.ndarray,
  ks: Sequence[int] = (1, 5),
  *,
  index: np.ndarray | None = None,
  link: str = 'softmax',
  label_weight: np.ndarray | None = None,
  expected_entropy: np.ndarray | None = None,
  nll: np.ndarray | None = None,
) -> ExampleScores:
  """The scores of labelled predictions.

      >>> import numpy as np
      >>> from het_plugin.measures import uncertainty
      >>> log_prob = np.log([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]])
      >>> scores = uncertainty.score_examples(log_prob, np.array([[0], [0], [1]]), ks=(1,))
      >>> scores.correct
      array([1. , 0. , 0.5])
      >>> round(uncertainty.summarize(scores)['nll'], 3)  # nats per example
      0.572

  Args:
    log_prob, link, expected_entropy: see `uncertainty`.
    labels: int [N, L], padded with -1.
    ks: the k of precision@k, in 1 .. K.
    index: int [N], distinct example ids; None for row numbers.
    label_weight: float [N, L], shares of the labels, for a softmax; None for equal ones.
    nll: float [N] in nats, of the model itself; None computes it from log_prob, which loses digits
      where a probability of a sigmoid is near 1.

  Raises:
    ValueError: a k or a label is out of range, an example of a softmax has no label, or a
      probability is NaN.
  """
  num_classes = log_prob.shape[1]
  if wrong := [k for k in ks if not 1 <= k <= num_classes]:
    raise ValueError(
      f'precision@k for k = {wrong[0]} does not exist: k is 1 .. K, the number of classes, '
      f'{num_classes}'
    )
  index = np.arange(len(log_prob)) if index is None else index
  votes.check_labels(labels, num_classes, link, index)
  given = {'label_weight': label_weight, 'expected_entropy': expected_entropy, 'nll': nll}
  parts = []
  for rows, log_p in blocks(log_prob):
    columns = {name: None if x is None else x[rows] for name, x in given.items()}
    parts.append(_score(log_p, labels[rows], index[rows], link, ks, **columns))
  return concatenate(parts)


def concatenate(parts: Sequence[_Scores]) -> _Scores:
  """Joins the scores of the parts of a split, which has every example id once."""
  if not parts:
    raise ValueError('there are no examples to evaluate')
  whole = _map(lambda *x: np.concatenate(x), *parts)
  if isinstance(whole, ExampleScores):
    num_distinct = len(np.unique(whole.index))
    if num_distinct != len(whole.index):
      raise ValueError(
        f'there are {len(whole.index)} examples but only {num_distinct} distinct example ids; a '
        'split must give each example once'
      )
  return whole


def _map(function: Callable[..., np.ndarray], *scores: Any) -> Any:
  """Scores whose arrays are the function of those of the given scores."""
  first = scores[0]
  if first is None:
    return None
  if isinstance(first, np.ndarray):
    return function(*scores)
  if isinstance(first, dict):
    return {key: _map(function, *(x[key] for x in scores)) for key in first}
  names = [field.name for field in dataclasses.fields(first)]
  fields = {name: _map(function, *(getattr(x, name) for x in scores)) for name in names}
  return type(first)(**fields)


def summarize(scores: ExampleScores) -> dict[str, Any]:
  """All metrics of a split.

  Args:
    scores: of `score_examples`, for all examples of the split.

  Returns:
    {name: value}, see the module docstring: 'nll', 'brier' and entropies in nats, the rest in
    [0, 1]. 'stderr' has the standard errors of the metrics that are means, by the same names.
  """
  confidence = np.exp(scores.uncertainty.log_confidence)
  risk = risk_coverage(scores.uncertainty.log_confidence, scores.correct)
  means = {'nll': scores.nll}
  means |= {f'precision_at_{k}': values for k, values in scores.precision.items()}
  means['brier'] = scores.brier
  if scores.ranking_ap is not None:
    means['ranking_ap'] = scores.ranking_ap
  result: dict[str, Any] = {name: float(values.mean()) for name, values in means.items()}
  result |= {
    'ece': scores.reliability().ece,
    'adaptive_ece': adaptive_reliability(confidence, scores.correct).ece,
    'aurc': float(risk.mean()),
    'e_aurc': float(risk.mean() - risk_coverage(scores.correct, scores.correct).mean()),
    'auroc_errors': auroc(
      -scores.uncertainty.log_confidence[scores.correct < 0.5],
      -scores.uncertainty.log_confidence[scores.correct >= 0.5],
    ),
    'confidence': float(confidence.mean()),
    'num_examples': len(scores.index),
  }
  label_free = {k: v for k, v in scores.uncertainty.scores().items() if k != 'max_prob'}
  result |= {name: float(values.mean()) for name, values in label_free.items()}
  result['stderr'] = {name: stderr(values) for name, values in (means | label_free).items()}
  return result


def difference(scores: ExampleScores, first: ExampleScores) -> dict[str, Any]:
  """The difference of `scores` to `first` on the same examples, with the paired standard error.

  Returns:
    Differences of the means of 'nll', 'brier' (of one link: a sigmoid's are sums over the classes)
    and 'precision_at_1' (if both have it), and under 'stderr' the standard deviation of the
    differences per example (n - 1) over sqrt N.
  """
  a, b = (_map(lambda x, s=s: x[np.argsort(s.index)], s) for s in (scores, first))
  needed = 'a paired comparison needs the ids and labels of the first row'
  if not np.array_equal(a.index, b.index):
    num_alone = len(np.setxor1d(a.index, b.index))
    raise ValueError(f'the ids differ, {num_alone:,} are in one of the two only: {needed}')
  if not np.array_equal(_trimmed(a.labels), _trimmed(b.labels)):
    raise ValueError(
      f'the same ids have other labels: {needed}. A file without the array index numbers its rows, '
      'so rows in another order need it'
    )
  if a.shares is not None and b.shares is not None:
    num = min(a.labels.shape[1], b.labels.shape[1])  # the rest is padding
    wrong = ~np.isclose(a.shares[:, :num], b.shares[:, :num], atol=1e-3).all(axis=1)
    for row in np.flatnonzero(wrong)[:1]:
      raise ValueError(
        f'label_weight of example {int(a.index[row])} differs: a paired comparison needs the '
        'shares of the labels of the first row'
      )
  with np.errstate(invalid='ignore'):  # inf - inf is NaN, which reports show as missing
    of_one_link = (a.shares is None) == (b.shares is None)
    differences = {'nll': a.nll - b.nll, 'brier': a.brier - b.brier} if of_one_link else {}
    if 1 in a.precision and 1 in b.precision:
      differences['precision_at_1'] = a.precision[1] - b.precision[1]
    result = {name: float(values.mean()) for name, values in differences.items()}
  return result | {'stderr': {name: stderr(values) for name, values in differences.items()}}


def stderr(values: np.ndarray) -> float | None:
  """Standard error of the mean of values [N] (n - 1); None for one value or if one is infinite."""
  if len(values) < 2 or not np.isfinite(values).all():
    return None
  return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def reliability(confidence: np.ndarray, correct: np.ndarray) -> Reliability:
  """Bins of equal width: bin m holds the confidences [N] in (m / M, (m + 1) / M], bin 0 also 0."""
  confidence = confidence.astype(np.float64)
  return _binned(bin_numbers(confidence), confidence, correct, NUM_BINS)


def bin_numbers(confidence: np.ndarray) -> np.ndarray:
  """The bin of equal width of each confidence, int, of the same shape."""
  return np.clip(np.ceil(confidence * NUM_BINS) - 1, 0, NUM_BINS - 1).astype(int)


def adaptive_reliability(confidence: np.ndarray, correct: np.ndarray) -> Reliability:
  """At most M bins, with numbers of examples as equal as ties allow.

  Bin m ends with the confidence of rank ceil(N (m + 1) / M); equal ends are one bin (Nixon et al.
  2019, https://arxiv.org/abs/1904.01685).
  """
  confidence = confidence.astype(np.float64)
  last = np.ceil(len(confidence) * np.arange(1, NUM_BINS + 1) / NUM_BINS).astype(int) - 1
  ends = np.unique(np.sort(confidence)[last])
  return _binned(np.searchsorted(ends, confidence), confidence, correct, len(ends))


def _binned(bins, confidence, correct, num_bins) -> Reliability:
  count = np.bincount(bins, minlength=num_bins)
  sums = (np.bincount(bins, weights=x, minlength=num_bins) for x in (confidence, correct))
  with np.errstate(invalid='ignore'):
    return Reliability(count, *(total / count for total in sums))


def risk_coverage(confidence: np.ndarray, correct: np.ndarray) -> np.ndarray:
  """Error rates of the n most confident examples, n = 1 .. N, float64 [N].

  `correct` [N] is whether an answer is right, or the probability that it is. Examples with equal
  confidences count as in a random order.
  """
  _, tie, size = np.unique(-np.asarray(confidence, float), return_inverse=True, return_counts=True)
  # The error rate of each group of ties, the most confident group first.
  rate = np.bincount(tie, weights=1.0 - correct) / size
  return np.repeat(rate, size).cumsum() / np.arange(1, len(confidence) + 1)


def auroc(
  positive: np.ndarray,
  negative: np.ndarray,
  positive_weight: np.ndarray | None = None,
  negative_weight: np.ndarray | None = None,
) -> float | None:
  """Probability that a score of `positive` [N] exceeds a score of `negative` [M]; ties count half.

  Scores may have weights, both or none. None if one of the two is empty or has no weight.
  """
  weight = None
  if positive_weight is not None and negative_weight is not None:
    positive = positive[positive_weight > 0]
    negative = negative[negative_weight > 0]
    both = positive_weight[positive_weight > 0], negative_weight[negative_weight > 0]
    weight = np.concatenate(both)
  if not len(positive) or not len(negative):
    return None
  is_positive, scores = _labelled(positive, negative)
  return float(metrics.roc_auc_score(is_positive, scores, sample_weight=weight))


def roc(positive: np.ndarray, negative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """False and true positive rates at all thresholds, ascending."""
  false_positive, true_positive, _ = metrics.roc_curve(*_labelled(positive, negative))
  return false_positive, true_positive


def fpr_at_95(unknown: np.ndarray, known: np.ndarray) -> float:
  """Share of `unknown` scores [N] at or below the least threshold that 95% of `known` [M] meet."""
  threshold = np.sort(known)[-(-95 * len(known) // 100) - 1]
  return float((unknown <= threshold).mean())


def detection(unknown: Uncertainty, known: Uncertainty) -> dict[str, dict[str, float | None]]:
  """{score: {'auroc', 'fpr_at_95'}} for separating unknown inputs from known inputs."""
  known_scores = known.scores()
  return {
    name: {
      'auroc': auroc(score, known_scores[name]),
      'fpr_at_95': fpr_at_95(score, known_scores[name]),
    }
    for name, score in unknown.scores().items()
  }


def blocks(log_prob: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
  """(rows, their log-probabilities in float64) of parts that fit in memory."""
  step = max(1, _BLOCK // log_prob.shape[1])
  for start in range(0, len(log_prob), step):
    rows = slice(start, start + step)
    yield rows, log_prob[rows].astype(np.float64)


def _uncertainty(log_p, link, expected_entropy) -> Uncertainty:
  entropy = _plogp(log_p)
  if link == 'sigmoid':
    entropy += _plogp(log1mexp(log_p))
  entropy = entropy.sum(axis=1)
  information = None
  if expected_entropy is not None:
    information = np.maximum(entropy - expected_entropy, 0.0)  # only rounding gives < 0
  return Uncertainty(log_p.max(axis=1), entropy, information)


def _score(log_p, labels, index, link, ks, label_weight, expected_entropy, nll) -> ExampleScores:
  """The scores of a block; log_p is float64 [n, K]."""
  for row in np.flatnonzero(np.isnan(log_p).any(axis=1))[:1]:
    raise ValueError(
      f'the probabilities of example {int(index[row])} are NaN: a parameter of the model, or the '
      'example itself, is not finite'
    )
  softmax = link == 'softmax'
  num_classes = log_p.shape[1]
  one_label = softmax and label_weight is None and ((labels >= 0).sum(axis=1) == 1).all()
  if not softmax:
    labels = _distinct(labels)
  is_label = votes.indicator(labels, num_classes)
  target = votes.shares(labels, num_classes, label_weight) if softmax else is_label  # [n, K]
  log_q = log1mexp(log_p)
  if nll is not None:
    nll = nll.astype(np.float64)
  elif softmax:
    nll = -(target * np.where(target > 0, log_p, 0.0)).sum(axis=1)
  else:
    nll = -np.where(is_label, log_p, log_q).sum(axis=1)
  if one_label or not softmax:  # exact where 1 - p is tiny
    brier = np.exp(2 * np.where(is_label, log_q, log_p)).sum(axis=1)
  else:
    brier = np.square(np.exp(log_p) - target).sum(axis=1)
  shares = None
  weight = 1.0
  if softmax:
    weight = np.ones(labels.shape) if label_weight is None else label_weight.astype(np.float64)
    shares = np.where(labels >= 0, weight, 0.0)
    weight = shares = shares / shares.sum(axis=1, keepdims=True)
  return ExampleScores(
    index=index,
    labels=labels,
    shares=shares,
    nll=nll + 0.0,  # a label of probability 1 has 0, not -0
    brier=brier,
    precision={
      k: (among * weight).sum(axis=1) / (1 if softmax else k)
      for k, among in _among_first(log_p, labels, ks).items()
    },
    correct=(target * votes.top_shares(log_p)).sum(axis=1),
    ranking_ap=None if softmax else _ranking_ap(log_p, labels, is_label),
    uncertainty=_uncertainty(log_p, link, expected_entropy),
  )


def _among_first(log_p: np.ndarray, labels: np.ndarray, ks: Sequence[int]) -> dict[int, np.ndarray]:
  """How surely each label is among the k most probable classes, {k: float64 [N, L]}; 0 for padding.

  If t classes are equally probable, and only j of them fit among the k, each counts as j / t.
  """
  found = {k: np.zeros(labels.shape) for k in ks}
  for column, label in enumerate(labels.T):
    at_label = np.take_along_axis(log_p, np.maximum(label, 0)[:, None], axis=1)
    before = (log_p > at_label).sum(axis=1)
    equal = (log_p == at_label).sum(axis=1)
    for k in ks:
      among = np.clip((k - before) / equal, 0.0, 1.0)
      found[k][:, column] = np.where(label >= 0, among, 0.0)
  return found


def _ranking_ap(log_p: np.ndarray, labels: np.ndarray, is_label: np.ndarray) -> np.ndarray:
  """Label ranking average precision of each example; 1 for an example without a label."""
  total = np.zeros(len(log_p))
  for label in labels.T:
    at_least = log_p >= np.take_along_axis(log_p, np.maximum(label, 0)[:, None], axis=1)
    share = (at_least & is_label).sum(axis=1) / at_least.sum(axis=1)
    total += np.where(label >= 0, share, 0.0)
  count = (labels >= 0).sum(axis=1)
  return np.where(count > 0, total / np.maximum(count, 1), 1.0)


def log1mexp(log_p: np.ndarray) -> np.ndarray:
  """log(1 - p) of log p <= 0, accurate near both ends (Maechler 2012); -inf for p = 1."""
  with np.errstate(divide='ignore'):  # np.where computes both branches everywhere
    return np.where(log_p > -np.log(2), np.log(-np.expm1(log_p)), np.log1p(-np.exp(log_p)))


def _plogp(log_p: np.ndarray) -> np.ndarray:
  """-p log p; 0 for p = 0. `scipy.special.entr` takes p, which rounds to 1 where log p is small."""
  p = np.exp(log_p)
  return -p * np.where(p > 0, log_p, 0.0)


def _labelled(positive, negative):
  """Labels and scores; scores become ranks, because scikit-learn refuses infinite ones."""
  labels = np.repeat([True, False], [len(positive), len(negative)])
  return labels, stats.rankdata(np.concatenate([positive, negative]), method='dense')


def _distinct(labels: np.ndarray) -> np.ndarray:
  """Labels [N, L] ascending, each once, padded with -1."""
  labels = -np.sort(-labels, axis=1)
  labels[:, 1:][labels[:, 1:] == labels[:, :-1]] = -1
  return -np.sort(-labels, axis=1)


def _trimmed(labels: np.ndarray) -> np.ndarray:
  """Labels without the padding columns that no example needs."""
  return labels[:, : 1 + max(np.flatnonzero((labels >= 0).any(axis=0)), default=0)]
