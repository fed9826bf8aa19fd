"""The value that evaluations and estimators share: columns of N examples, with their labels."""

import dataclasses
import itertools
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from het_plugin.measures import votes
from het_plugin.rows import labels as labels_lib

_FEATURES = 'features'
_SHUFFLE_SEED = 0x2F101FE2  # of the first epoch of `data.one_pass`


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
  """Named columns of N examples of a split.

      >>> import numpy as np
      >>> from het_plugin import rows
      >>> log_prob, labels = np.log([[0.9, 0.1], [0.2, 0.8]]), np.array([[0], [1]])
      >>> found = rows.Rows({'log_prob': log_prob}, labels, index=np.array([7, 3]))
      >>> np.exp(found.ordered().label_log_prob).round(2)
      array([0.8, 0.9])

  Attributes:
    columns: {name: array [N, ...]}. 'features' is float [N, D]. 'log_prob' is float32 or float64
      [N, K], at most 0: log p(k | x) with a softmax, log p(y_k = 1 | x) per class with a sigmoid.
      'expected_entropy' is float32 [N] in nats (`Integrator.expected_entropy`), of predictions with
      noise. 'nll' is float32 [N] in nats, from the model itself, because the log_prob of a sigmoid
      does not determine it exactly.
    labels: int32 [N, L], padded with -1: one class, several classes, or the votes of several
      people.
    index: int64 [N], distinct example ids >= 0.
    label_weight: float32 [N, L], the share of each label; None for equal ones.
    annotator: int32 [N, L], who gave each vote, -1 for none; None if it is not known.
    link: 'softmax' or 'sigmoid', of log_prob.
    class_names: names of the K classes; None if they are not known.
    by_name: whether the labels were names, of which the numbers were made.
    provenance: origin of the rows as JSON values: checkpoint, task, split, layer, ...
  """

  columns: Mapping[str, np.ndarray]
  labels: np.ndarray
  index: np.ndarray
  label_weight: np.ndarray | None = None
  annotator: np.ndarray | None = None
  link: str = 'softmax'
  class_names: tuple[str, ...] | None = None
  by_name: bool = False
  provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return len(self.index)

  def __getitem__(self, column: str) -> np.ndarray:
    """A column by name; ValueError if there is none."""
    if column not in self.columns:
      raise ValueError(f'there is no column {column!r}; there are {", ".join(self.columns)}')
    return self.columns[column]

  @property
  def features(self) -> np.ndarray:
    """The column 'features', float [N, D]."""
    return self['features']

  @property
  def log_prob(self) -> np.ndarray:
    """The column 'log_prob', float [N, K]."""
    return self['log_prob']

  @property
  def label(self) -> np.ndarray:
    """The label of each example, int32 [N].

    Raises:
      ValueError: an example has no label or several.
    """
    count = (self.labels >= 0).sum(axis=1)
    if (count != 1).any():
      row = int(np.flatnonzero(count != 1)[0])
      raise ValueError(
        f'example {int(self.index[row])} has {int(count[row])} labels; each must have one'
      )
    return self.labels.max(axis=1)

  @property
  def consensus(self) -> np.ndarray:
    """One label of each example, int [N]: of the votes of several people the most frequent one.

    Of equally many the first in the row is taken (`votes.majority`).

    Raises:
      ValueError: an example has no label, or several that are no votes.
    """
    count = (self.labels >= 0).sum(axis=1)
    if (count == 0).any():
      raise ValueError(f'example {int(self.index[np.argmin(count)])} has no label')
    if not self.are_votes and (count > 1).any():
      row = int(np.argmax(count > 1))
      raise ValueError(
        f'example {int(self.index[row])} has {int(count[row])} labels, and none is there twice: '
        'each must have one, or votes with the array annotator or label_weight'
      )
    return votes.majority(self.labels, self.label_weight)

  @property
  def are_votes(self) -> bool:
    """Whether several labels of an example are votes, as far as it can be told."""
    if self.annotator is not None or self.label_weight is not None:
      return True
    ordered = np.sort(self.labels, axis=1)
    return bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any())

  def consensus_note(self) -> str | None:
    """How many labels are a consensus, for a report; None if none is."""
    several = ((self.labels >= 0).sum(axis=1) > 1) & (self.labels != self.labels[:, :1]).any(axis=1)
    if not several.any():
      return None
    rows = self.take(np.flatnonzero(several))
    shares = votes.shares(rows.labels, self.num_classes, rows.label_weight)
    ties = int(((votes.majority_shares(shares) > 0).sum(axis=1) > 1).sum())
    return (
      f'{len(rows):,} of {len(self):,} examples have several labels, which are votes: the label '
      f'with the most votes is taken. In {ties:,} of them others have as many, and the first is '
      'taken.'
    )

  @property
  def num_classes(self) -> int:
    """K: the number of class names, or without them the largest label plus one."""
    return int(self.labels.max()) + 1 if self.class_names is None else len(self.class_names)

  @property
  def label_log_prob(self) -> np.ndarray:
    """log p(y | x) of the single label, [N], for a softmax link."""
    return np.take_along_axis(self.log_prob, self.label[:, None], axis=1)[:, 0]

  @property
  def predictive(self) -> dict[str, Any]:
    """What measures take of predictions, by the names of their arguments."""
    return {
      'log_prob': self.log_prob,
      'link': self.link,
      'expected_entropy': self.columns.get('expected_entropy'),
    }

  @property
  def labelled(self) -> dict[str, Any]:
    """`predictive` and the labels: the arguments of `uncertainty.score_examples`."""
    names = ('labels', 'index', 'label_weight')
    nll = self.columns.get('nll') if self.link == 'sigmoid' else None
    return {**self.predictive, **{name: getattr(self, name) for name in names}, 'nll': nll}

  @property
  def meaning(self) -> dict[str, Any]:
    """What rows of one model must have in common; None for what they do not say."""
    names = 'checkpoint', 'layer', 'feature_names'
    of_model = {name: self.provenance.get(name) for name in names}
    dim = self.features.shape[1] if 'features' in self.columns else None
    return {'D': dim, **of_model, 'by_name': self.by_name, 'classes': self.class_names}

  def named(self, names: Sequence[str]) -> 'Rows':
    """These rows with the numbers of `names`: their labels, and the columns of predictions.

    Raises:
      ValueError: a label is none of these names, or predictions are of other classes.
    """
    own = self.class_names or ()
    columns = dict(self.columns)
    if 'log_prob' in columns:
      number = labels_lib.class_numbers('', own, names)
      labels_lib.class_numbers('', names, own)
      columns['log_prob'] = self.log_prob[:, [number[name] for name in names]]
    labels, names = labels_lib.number_names(np.array([*own, ''], object)[self.labels], names)
    return dataclasses.replace(self, columns=columns, labels=labels, class_names=names)

  def in_order(self, names: Sequence[str] | None) -> 'Rows':
    """These rows with their classes in this order, if `names` are the same ones; else unchanged."""
    own = self.class_names
    if own is None or names is None or own == tuple(names) or sorted(own) != sorted(names):
      return self
    return self.named(names)

  def take(self, which: slice | np.ndarray) -> 'Rows':
    """Some of the examples."""
    return _each(lambda x: x[which], self)

  def chosen(self, count: int | None) -> 'Rows':
    """At most `count` examples, a fixed random choice, ascending by id; None for all.

    Of the rows of a whole split it is the choice that a run makes (`data.one_pass`).
    """
    if count is None or count >= len(self):
      return self
    from grain.experimental import index_shuffle  # takes seconds to import

    last = len(self) - 1
    places = [index_shuffle(i, last, seed=_SHUFFLE_SEED, rounds=4) for i in range(count)]
    return self.take(np.argsort(self.index, kind='stable')[np.sort(places)])

  def without(self, column: str) -> 'Rows':
    """These examples without a column."""
    columns = {name: x for name, x in self.columns.items() if name != column}
    return dataclasses.replace(self, columns=columns)

  def ordered(self) -> 'Rows':
    """These examples, ascending by id."""
    return self.take(np.argsort(self.index, kind='stable'))


_PER_EXAMPLE = ('labels', 'index', 'label_weight', 'annotator')
_OF_BATCH = ('label', 'index', 'label_weight', 'annotator')  # the same, as a batch names them


def _each(function: Any, *parts: Rows) -> Rows:
  """Rows whose arrays are the function of those of the parts; the rest is that of the first."""
  first = parts[0]
  columns = {name: function(*(part.columns[name] for part in parts)) for name in first.columns}
  others = {
    name: function(*(getattr(part, name) for part in parts))
    for name in _PER_EXAMPLE
    if getattr(first, name) is not None
  }
  return dataclasses.replace(first, columns=columns, **others)


def concatenate(parts: Sequence[Rows]) -> Rows:
  """Joins the parts of a split in their order."""
  return _each(lambda *x: np.concatenate(x), *parts)


def ordered(parts: Sequence[Rows]) -> Rows:
  """Joins the parts of a split, ascending by id.

  Raises:
    ValueError: there are no examples, or an id is there twice.
  """
  if not sum(map(len, parts)):
    raise ValueError('The split has no examples to evaluate.')
  whole = concatenate(parts)
  if (num_distinct := len(np.unique(whole.index))) != len(whole):
    raise ValueError(
      f'The split gives {len(whole)} examples but only {num_distinct} distinct example ids; an '
      'evaluation split must give each example once.'
    )
  return whole.ordered()


def of_batch(columns: Mapping[str, np.ndarray], link: str = 'softmax') -> Rows:
  """Rows of the columns of a batch, which have its labels and index as columns too."""
  others = {name: x for name, x in columns.items() if name not in _OF_BATCH}
  if 'log_prob' in others:  # a mean over samples may round to above 0
    others['log_prob'] = np.minimum(others['log_prob'], 0.0)
  return Rows(
    others,
    columns['label'],
    columns['index'].astype(np.int64),
    columns.get('label_weight'),
    columns.get('annotator'),
    link,
  )


def column(layer: str) -> str:
  """The column of a layer of a model, a valid file name for any layer name.

  >>> column('block_0/mlp')
  'features.block_0%2Fmlp'
  """
  return f'{_FEATURES}.{urllib.parse.quote(layer, safe="")}'


def layer_of(column: str) -> str:
  """The layer of a column: that of `column`, or the pre-logits for 'features'."""
  _, _, layer = column.partition('.')
  return urllib.parse.unquote(layer) or 'pre_logits'


def paired(sources: Sequence[str], first: Mapping[str, Any], other: Rows) -> Rows:
  """Rows of the second of two sources with the numbers of the first, where its labels are names or
  all its classes are classes of the first; predictions must be of the same classes, and features as
  in `check_features`.

  Args:
    sources: the two, as errors name them.
    first: `Rows.meaning` of the first. What one of the two does not say is not compared.
    other: the rows of the second.

  Raises:
    ValueError: columns or labels mean something else in the second.
  """
  theirs_of = other.meaning
  classes = first['classes']
  if first['by_name'] != other.by_name and None in (classes, other.class_names):
    by_name, numbered = sources if first['by_name'] else sources[::-1]
    raise ValueError(
      f'the labels of {by_name} are names, and those of {numbered} numbers without names: write '
      'both as names, or both as numbers'
    )
  check_features(sources, first, theirs_of)
  if classes in (None, other.class_names) or other.class_names is None:
    return other
  known = set(other.class_names)
  is_same = known == set(classes)
  fits = is_same if 'log_prob' in other.columns else other.by_name or known.issubset(classes)
  if fits and len(known) == len(other.class_names):
    try:
      return other.named(classes)
    except ValueError as error:
      raise ValueError(f'{sources[1]}: {error} in {sources[0]}') from error
  both = enumerate(itertools.zip_longest(classes, other.class_names))
  label, (ours, theirs) = next((k, names) for k, names in both if names[0] != names[1])
  raise ValueError(
    f'label {label} is {theirs!r} in {sources[1]} and {ours!r} in {sources[0]}: both must have the '
    'same classes'
  )


def check_features(
  sources: Sequence[str], first: Mapping[str, Any], other: Mapping[str, Any]
) -> None:
  """Raises ValueError if what two sources say of their features (`Rows.meaning`) differs."""
  for name in ('D', 'checkpoint', 'layer'):
    ours = first[name]
    theirs = other[name]
    if None not in (ours, theirs) and ours != theirs:
      raise ValueError(
        f'{sources[1]} has {name} {theirs} and {sources[0]} {name} {ours}: both must be of the '
        'same model and layer'
      )
  check_names(sources, first['feature_names'], other['feature_names'])


def check_names(
  sources: Sequence[str], first: Sequence[str] | None, other: Sequence[str] | None
) -> None:
  """Raises ValueError if columns of equally many features have other names; None are unknown."""
  if first is None or other is None:
    return
  for number, (ours, theirs) in enumerate(zip(first, other, strict=False)):
    if ours != theirs:
      raise ValueError(
        f'feature {number} is {theirs!r} in {sources[1]} and {ours!r} in {sources[0]}: both must '
        'have the same columns in the same order'
      )
