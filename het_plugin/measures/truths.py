"""The truths of rows from probabilities and votes, and the confusions of those who voted.

The truth k of a row has the probability p_k that a model gives it. Annotator a writes y for it with
probability T^a_ky (Dawid and Skene 1979, https://doi.org/10.2307/2346806), so

    q_k ~ p_k prod_(a, y) T^a_ky

over the votes of the row. Expectation-maximisation finds T. An annotator who has given few votes is
like the others: T^a is the mean of a Dirichlet posterior with the weight of s votes for each truth,
and s is what makes the votes most likely. The mean of its prior are the confusions T of all
together, with errors times r_a, the number of a's errors over that of others for the same truths.
With one annotator, or none that is known, T^a is T.

Temporary files hold p. Of more than `FULL` classes they hold few for each row, with the mass of all
others: those with votes, `TOP` with the largest p, and as many with the largest q, once confusions
are known. The others of a row count as one class. So 8 K bytes for a row become 400, and K may be
10^5.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy import sparse, special

from het_plugin.system import temporary

FULL = 128
TOP = 24
# Of the rows whose posteriors are in memory at one time. 2^24 took three times as long: the system
# takes such arrays back at each step.
BLOCK_BYTES = 2**22
_MAX_ROUNDS = 500
_TOLERANCE = 1e-6  # nats per example
_NO_VOTE = 0  # the number of the pair of a missing vote
_PRIOR_ERRORS = 1.0  # by which r_a is near 1
_MOST_ERRORS = 0.99
_LEAST_VOTES = 1e-6  # expected ones; fewer, with a prior near 0, would count as much as a vote
_PRIOR_VOTES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_TINY = np.finfo(np.float64).tiny


class Posterior(NamedTuple):
  """Rows [b] with W truths each.

  Attributes:
    rows: which rows.
    p, q: float64 [b, W], probabilities of the truths before and after the votes are known.
    log_likelihood: float64 [b], of the votes.
  """

  rows: slice
  p: np.ndarray
  q: np.ndarray
  log_likelihood: np.ndarray


class Votes:
  """N rows with votes, and the probabilities of their truths; fill it with `put`, then `close` it.

  Attributes:
    num_classes: K; the number K stands for all classes of a row that are not kept.
    label: int [N], the classes that are audited.
    votes: int [N, L], classes, -1 where there is none.
    annotator: int [N, L], numbers below A.
    num_annotators: A.
    width: W, the number of truths of a row.
    annotator_of, truth_of, label_of: int [U], annotator, truth and vote of each pair. The first
      pair stands for no vote.
  """

  def __init__(
    self,
    label: np.ndarray,
    num_classes: int,
    votes: np.ndarray | None = None,
    annotator: np.ndarray | None = None,
    before: 'Confusions | None' = None,
  ):
    """Holds no probabilities yet.

    Args:
      label, num_classes, votes, annotator: those of the attributes; votes and annotator may be
        None, for the labels of one annotator.
      before: confusions like those that will be found, by which classes are kept.
    """
    self.num_classes = num_classes
    self.label = label
    self.votes = label[:, None]
    self.annotator = np.zeros_like(self.votes)
    if votes is not None and annotator is not None:
      is_given = (votes >= 0) & (annotator >= 0)
      self.votes = np.where(is_given, votes, -1)
      self.annotator = np.where(is_given, annotator, 0)
    last = np.argsort(self.votes < 0, axis=1, kind='stable')  # those that are missing
    self.votes = np.take_along_axis(self.votes, last, axis=1)
    self.annotator = np.take_along_axis(self.annotator, last, axis=1)
    self.num_annotators = int(self.annotator.max()) + 1
    num_votes = self.votes.shape[1]
    width = 2 * TOP + num_votes + 1
    self._is_full = num_classes <= max(FULL, width)
    self.width = num_classes if self._is_full else width
    self._labels = self._place = np.zeros(0, int)
    self._likely = None if before is None or self._is_full else before.likely()
    self._p = temporary.array((len(label), self.width), np.float32)
    # All pairs of a truth and a label that occurs are then in order, and need no numbers.
    self._is_table = self._is_full and self.num_annotators == num_votes == 1
    shape = len(label), num_votes, self.width
    self._pair = temporary.array((1, 1, 1) if self._is_table else shape, np.int32)

  def __len__(self) -> int:
    return len(self.label)

  def put(self, rows: slice | np.ndarray, p: np.ndarray) -> None:
    """Takes the probabilities [b, K] of some rows."""
    if self._is_full:
      if not self._is_table:
        self._pair[rows, 0] = np.arange(self.num_classes)
      self._p[rows] = p
      return
    voted = self.votes[rows]
    voted = np.where(voted >= 0, voted, voted[:, :1])
    score = np.array(p, np.float32)
    np.put_along_axis(score, voted, np.inf, axis=1)
    count = self.width - 1
    if self._likely is not None:
      first = np.argpartition(score, -TOP, axis=1)[:, -TOP:]
      truth, rate = (x[voted].reshape(len(p), -1) for x in self._likely)
      q = np.take_along_axis(p, truth, axis=1) * rate
      best = np.argpartition(q, -TOP, axis=1)[:, -TOP:]
      best = np.take_along_axis(truth, best, axis=1)
      np.put_along_axis(score, np.concatenate([first, best], axis=1), np.inf, axis=1)
    top = np.argpartition(score, -count, axis=1)[:, -count:]
    kept = np.take_along_axis(p, top, axis=1)
    rest = p.sum(axis=1, dtype=np.float64) - kept.sum(axis=1, dtype=np.float64)
    self._pair[rows, 0] = np.pad(top, ((0, 0), (0, 1)), constant_values=self.num_classes)
    self._p[rows] = np.concatenate([kept, np.maximum(rest, 0.0)[:, None]], axis=1)

  def close(self) -> 'Votes':
    """Numbers the pairs of truth and vote, after all rows are there."""
    if self._is_table:
      self._labels, self._place = np.unique(self.label, return_inverse=True)
      table = np.arange(self.num_classes)[:, None] * self.num_classes + self._labels
      found = np.concatenate([[-1], table.ravel()])
    else:
      found = np.unique(np.concatenate([np.unique(self._keys(rows)) for rows in self._blocks()]))
      found = found if found[0] == -1 else np.concatenate([[-1], found])
      for rows in self._blocks():
        self._pair[rows] = np.searchsorted(found, self._keys(rows))
    rest, self.label_of = np.divmod(found, self.num_classes)
    self.annotator_of, self.truth_of = np.divmod(rest, self.num_classes + 1)
    return self

  def _blocks(self) -> Iterator[slice]:
    size = max(1, BLOCK_BYTES // (8 * self.width * (self.votes.shape[1] + 1)))
    return (slice(start, start + size) for start in range(0, len(self), size))

  def _keys(self, rows: slice) -> np.ndarray:
    """A number for each annotator, truth and vote, [b, L, W], where the truths are written; -1 for
    no vote.
    """
    vote = self.votes[rows][:, :, None]
    truth = np.asarray(self._pair[rows, :1], np.int64)
    annotator = self.annotator[rows][:, :, None].astype(np.int64)
    key = (annotator * (self.num_classes + 1) + truth) * self.num_classes + vote
    return np.where(vote >= 0, key, -1)

  def truths(self, rows: slice) -> np.ndarray:
    """The truths of some rows, int [b, W]; K is those that are not kept."""
    if self._is_full:
      return np.broadcast_to(np.arange(self.num_classes), (len(self.label[rows]), self.width))
    return self.truth_of[np.asarray(self._pair[rows, 0])]

  def at(self, values: np.ndarray, rows: slice) -> np.ndarray:
    """Values [U] of the pairs of some rows, [b, L, W]."""
    if self._is_table:
      table = np.ascontiguousarray(values[1:].reshape(self.num_classes, -1).T)
      return np.take(table, self._place[rows], axis=0)[:, None]
    return values[np.asarray(self._pair[rows])]

  def sums(self, weights: np.ndarray, rows: slice) -> np.ndarray:
    """The sums [U] over the pairs of some rows of weights [b, L, W]; 0 for no vote."""
    if self._is_table:
      place = self._place[rows]
      one = np.ones(len(place)), place, np.arange(len(place) + 1)
      by_label = sparse.csc_array(one, shape=(len(self._labels), len(place))) @ weights[:, 0]
      return np.concatenate([[0.0], by_label.T.ravel()])
    pair = np.asarray(self._pair[rows], np.int64)
    total = np.bincount(pair.ravel(), weights.ravel(), len(self.truth_of))
    total[_NO_VOTE] = 0.0
    return total

  def posteriors(self, rates: 'Rates') -> Iterator[Posterior]:
    """The posteriors of all rows, in blocks."""
    for rows in self._blocks():
      p = np.asarray(self._p[rows], np.float64)
      rate = self.at(rates.of_pair, rows)  # [b, L, W]
      if not self._is_full:
        pair = np.asarray(self._pair[rows], np.int64)
        kept = pair[..., :-1]
        left = rates.of_others[pair[..., -1]] - rates.of_other[kept].sum(axis=-1)
        share = 1.0 - rates.frequency[kept].sum(axis=-1)
        of_rest = np.maximum(left, 0.0) / np.maximum(share, _TINY)
        rate[..., -1] = np.where(pair[..., -1] == _NO_VOTE, 1.0, np.minimum(of_rest, 1.0))
      shift = np.zeros(len(p))
      if rate.shape[1] == 1:
        q = p * rate[:, 0]
      else:  # a product of many rates may be too small for a number
        score = np.log(np.maximum(rate, 1e-300)).sum(axis=1) + np.log(np.maximum(p, _TINY))
        shift = score.max(axis=1)
        q = np.exp(score - shift[:, None])
      total = np.maximum(q.sum(axis=1), _TINY)
      q /= total[:, None]
      yield Posterior(rows, p, q, np.log(total) + shift)

  def counts(self, rates: 'Rates') -> tuple[np.ndarray, float]:
    """Expected votes for each pair, float64 [U], and the mean log-likelihood of a row's votes."""
    joint = np.zeros(len(self.truth_of))
    total = 0.0
    num_votes = self.votes.shape[1]
    for part in self.posteriors(rates):
      shape = len(part.q), num_votes, self.width
      joint += self.sums(np.broadcast_to(part.q[:, None], shape), part.rows)
      total += float(part.log_likelihood.sum())
    return joint, total / len(self)

  def fit(self) -> 'Confusions':
    """The confusions that make the votes most likely."""
    groups = _Groups.of(self)
    shared = np.where(groups.truth == groups.label, 0.9, 0.1 / max(self.num_classes - 1, 1))
    frequency = np.full(self.num_classes + 1, 1.0 / self.num_classes)
    frequency[-1] = 0.0
    rates = groups.table(shared, shared[groups.of_pool], frequency)
    prior_votes = np.inf
    for _ in range(1 if self.num_annotators == 1 else 3):
      before = -np.inf
      for _ in range(_MAX_ROUNDS):
        joint, now = self.counts(rates)
        rates = groups.rates(joint, prior_votes, rates)
        if abs(now - before) < _TOLERANCE:
          break
        before = now
      found = Confusions(self, rates, joint, groups, prior_votes)
      if self.num_annotators > 1:
        prior_votes = max(_PRIOR_VOTES, key=found.evidence)
    return found


class Rates(NamedTuple):
  """The rates T^a_ky of pairs, and what gives those of truths that a row does not keep.

  Such a truth is any class but the label and those that are kept, by the frequencies c of the
  classes.

  Attributes:
    shared: [V], T_ky of all annotators together.
    of_pair: [U], T^a_ky.
    frequency: [U], c_k.
    of_other: [U], c_k T_ky, 0 for the label itself.
    of_others: [U], the sum of these over all truths of the label.
  """

  shared: np.ndarray
  of_pair: np.ndarray
  frequency: np.ndarray
  of_other: np.ndarray
  of_others: np.ndarray


class _Groups(NamedTuple):
  """Which pairs [U] are of the same (truth, label), and of the same (annotator, truth).

  Attributes:
    of_pool: int [U], the number of (truth, label).
    truth, label: int [V], of each of these.
    of_annotator: int [U], the number of (annotator, truth).
    annotator, annotator_truth: int [G], of each of these.
  """

  of_pool: np.ndarray
  truth: np.ndarray
  label: np.ndarray
  of_annotator: np.ndarray
  annotator: np.ndarray
  annotator_truth: np.ndarray

  @classmethod
  def of(cls, votes: Votes) -> '_Groups':
    pool, of_pool = np.unique(
      votes.truth_of * votes.num_classes + votes.label_of, return_inverse=True
    )
    truth, label = np.divmod(pool, votes.num_classes)
    annotator = np.maximum(votes.annotator_of, 0)
    group, of_group = np.unique(
      annotator * (votes.num_classes + 1) + votes.truth_of, return_inverse=True
    )
    both = np.divmod(group, votes.num_classes + 1)
    return cls(of_pool.ravel(), truth, label, of_group.ravel(), *both)

  def pooled(self, joint: np.ndarray) -> np.ndarray:
    """Expected votes [V] of all annotators."""
    return np.bincount(self.of_pool, joint, len(self.truth))

  def rates(self, joint: np.ndarray, prior_votes: float, before: Rates) -> Rates:
    """The rates of expected votes [U], given those before; a truth without votes keeps its rates.

    The votes of truths that are not kept are divided among all but the label.
    """
    pooled = self.pooled(joint)
    frequency = np.bincount(self.truth, pooled).astype(np.float64)  # [K + 1]
    is_rest = self.truth == len(frequency) - 1
    frequency[-1] = 0.0
    frequency = frequency / max(frequency.sum(), _TINY)
    num_labels = int(self.label.max()) + 1
    weight = frequency[self.truth] * before.shared * (self.truth != self.label)
    of_label = np.bincount(self.label, weight, num_labels)
    rest = np.bincount(self.label[is_rest], pooled[is_rest], num_labels)
    pooled = pooled + weight * (rest / np.maximum(of_label, _TINY))[self.label]
    total = np.bincount(self.truth, pooled)[self.truth]
    shared = np.where(total > 0, pooled / np.where(total > 0, total, 1.0), before.shared)
    rate, _ = self.expected(joint, shared)
    if np.isfinite(prior_votes):
      given = np.bincount(self.of_annotator, joint)[self.of_annotator]
      rate = (joint + prior_votes * rate) / (given + prior_votes)
    return self.table(shared, rate, frequency)

  def expected(self, joint: np.ndarray, shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The means of the priors: rates [U], and the share of errors of each (annotator, truth) [G].

    Args:
      joint: [U], expected votes.
      shared: [V], the rates of all annotators together.
    """
    rate = shared[self.of_pool]
    if self.annotator.max() == 0:
      return rate, np.zeros(len(self.annotator))
    num_truths = int(self.truth.max()) + 1
    is_error = self.truth != self.label
    errors = np.bincount(self.truth, shared * is_error, num_truths)
    errors[-1] = 0.0  # of truths that are not kept
    given = np.bincount(self.of_annotator, joint)
    usual = np.bincount(self.annotator, given * errors[self.annotator_truth])
    is_own = is_error[self.of_pool] & (self.truth[self.of_pool] < num_truths - 1)
    own = np.bincount(self.annotator[self.of_annotator], joint * is_own)
    factor = (own + _PRIOR_ERRORS) / (usual + _PRIOR_ERRORS)
    of_group = np.minimum(factor[self.annotator] * errors[self.annotator_truth], _MOST_ERRORS)
    times = of_group / np.maximum(errors[self.annotator_truth], _TINY)  # [G]
    times = np.where(errors[self.annotator_truth] > 0, times, 1.0)[self.of_annotator]
    right = 1.0 - of_group[self.of_annotator]
    return np.where(is_error[self.of_pool], rate * times, right), of_group

  def table(self, shared: np.ndarray, rate: np.ndarray, frequency: np.ndarray) -> Rates:
    """`Rates` of shared rates [V], rates [U] and frequencies [K + 1]."""
    of_other = frequency[self.truth] * shared * (self.truth != self.label)
    of_others = np.bincount(self.label, of_other)[self.label]
    rate = np.array(rate)
    rate[_NO_VOTE] = 1.0
    own = frequency[self.truth][self.of_pool]
    return Rates(shared, rate, own, of_other[self.of_pool], of_others[self.of_pool])


@dataclasses.dataclass(frozen=True, eq=False)
class Confusions:
  """The confusions of annotators, at the end of a fit.

  Attributes:
    votes: what they are fitted to.
    rates: T.
    joint: float64 [U], expected votes.
    groups: which pairs belong together.
    prior_votes: s; infinity with one annotator.
  """

  votes: Votes
  rates: Rates
  joint: np.ndarray
  groups: _Groups
  prior_votes: float

  @property
  def shared(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Truths, labels and rates T_ky [V] of all annotators together, of kept classes."""
    groups = self.groups
    is_class = groups.truth < self.votes.num_classes
    return groups.truth[is_class], groups.label[is_class], self.rates.shared[is_class]

  def likely(self) -> tuple[np.ndarray, np.ndarray]:
    """The 4 `TOP` truths for which each label is most often written, int [K, 4 TOP], and T_ky."""
    truth, label, rate = self.shared
    order = np.lexsort((-rate, label))
    truth = truth[order]
    label = label[order]
    rate = rate[order]
    place = np.arange(len(label)) - np.searchsorted(label, label)  # among those of the label
    is_likely = place < 4 * TOP
    place = place[is_likely]
    label = label[is_likely]
    truths = np.repeat(np.arange(self.votes.num_classes)[:, None], 4 * TOP, axis=1)
    rates = np.zeros(truths.shape, np.float32)
    truths[label, place] = truth[is_likely]
    rates[label, place] = rate[is_likely]
    return truths, rates

  def evidence(self, prior_votes: float) -> float:
    """The log-likelihood of expected votes, in nats, with rates from the Dirichlet prior."""
    groups = self.groups
    prior = prior_votes * groups.expected(self.joint, self.rates.shared)[0]
    is_given = (self.joint > _LEAST_VOTES) & (prior > 0)
    of_vote = special.gammaln((self.joint + prior)[is_given]) - special.gammaln(prior[is_given])
    given = np.bincount(groups.of_annotator, self.joint)
    of_group = special.gammaln(prior_votes) - special.gammaln(given + prior_votes)
    return float(of_vote.sum() + of_group.sum())

  def annotators(self) -> tuple[np.ndarray, np.ndarray]:
    """How many votes each annotator has given, int [A], and what share of them is right, [A].

    The share is the mean of T^a_kk over the probable truths k of these votes.
    """
    votes = self.votes
    groups = self.groups
    given = np.bincount(groups.of_annotator, self.joint)
    is_right = votes.truth_of == votes.label_of
    right = np.bincount(groups.of_annotator, self.joint * is_right)
    share = 1.0 - groups.expected(self.joint, self.rates.shared)[1]
    if np.isfinite(self.prior_votes):
      share = (right + self.prior_votes * share) / (given + self.prior_votes)
    share = np.where(groups.annotator_truth < votes.num_classes, share, 0.0)
    count = np.bincount(votes.annotator[votes.votes >= 0], minlength=votes.num_annotators)
    total = np.bincount(groups.annotator, given * share, votes.num_annotators)
    return count, total / np.maximum(count, 1)
