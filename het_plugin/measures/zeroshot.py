"""Zero-shot classification and retrieval by embeddings of images and texts.

The embedding of a class comes from texts: its name fills each prompt template, and the embeddings
of these texts are normalised, averaged over templates and normalised again (Radford et al. 2021,
https://arxiv.org/abs/2103.00020, section 3.1.4; Zhai et al. 2022,
https://arxiv.org/abs/2111.07991). An image gets the class of the largest dot product (Collier et
al. 2023, appendix A.2).

Ranks are exact up to the rounding of the float32 dot products. The order of equal scores counts as
random, so nothing depends on the numbering of classes or captions. A right answer whose score is
NaN counts as wrong, and a wrong answer whose score is NaN comes first.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from het_plugin.measures import votes

if TYPE_CHECKING:
  from scipy import sparse

RECALL_AT = (1, 5, 10)
WAYS = ('image_to_text', 'text_to_image')
_BLOCK_ELEMENTS = 1 << 25  # scores held at once in float32: 128 MiB

# N queries (images or captions), M or K candidates (captions, images or classes), D dimensions.


@dataclasses.dataclass(frozen=True)
class Accuracy:
  """The accuracy of zero-shot classification."""

  top1: float  # the share of images with a right class among the first 1 and 5, in [0, 1]
  top5: float
  num_examples: int  # number of images
  num_classes: int  # K
  # number of classes whose texts have the same tokens as the texts of an earlier class. The
  # model cannot tell them apart, so their images count as guessed among them
  classes_alike: int = 0

  def record(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  def scalars(self) -> dict[str, float]:
    return {'top1': self.top1, 'top5': self.top5}


@dataclasses.dataclass(frozen=True)
class Recall:
  """The recall of retrieval."""

  # {k: the share of images with one of their captions among the first k}
  image_to_text: Mapping[int, float]
  # {k: the share of captions with their image among the first k}
  text_to_image: Mapping[int, float]
  num_images: int  # sizes of the data set
  num_captions: int
  captions_alike: int  # number of captions that equal an earlier one in the model's tokens

  def record(self) -> dict[str, Any]:
    fields = dataclasses.asdict(self)
    return {'recall_at': {way: fields.pop(way) for way in WAYS}, **fields}

  def scalars(self) -> dict[str, float]:
    return {f'{way}/recall{k}': x for way in WAYS for k, x in getattr(self, way).items()}


def class_embeddings(
  embed: Callable[[np.ndarray], np.ndarray], tokens: Iterable[np.ndarray]
) -> tuple[np.ndarray, int]:
  """Class embeddings, and the number of classes with the token ids of an earlier class.

  An embedding is the normalised mean over templates of normalised embeddings, float32 [K, D]. Of
  each template there are the token ids int32 [K, L] of its texts, which `embed` maps to float
  [N, D].
  """
  total = np.zeros(())
  texts = []
  for ids in tokens:
    distinct, text = np.unique(ids, axis=0, return_inverse=True)
    text = text.reshape(-1)
    embedded = normalized(embed(distinct), 'text')[text]  # equal texts get equal bits
    total = total + embedded
    texts.append(text)
  alike = len(total) - len(np.unique(np.stack(texts, axis=1), axis=0))
  return normalized(total, 'class').astype(np.float32), alike


def normalized(x: np.ndarray, what: str) -> np.ndarray:
  """Rows x [N, D] divided by their lengths, float64; ValueError if one is 0 or not finite."""
  x = np.asarray(x, np.float64)
  length = np.linalg.norm(x, axis=1, keepdims=True)
  wrong = ~(np.isfinite(length) & (length > 0))[:, 0]
  if wrong.any():
    raise ValueError(
      f'The embedding of {what} {int(np.argmax(wrong))} has the length {length[wrong][0, 0]}: it '
      'must be finite and positive'
    )
  return x / length


def hit_rates(scores: np.ndarray, right: np.ndarray, ks: Sequence[int]) -> np.ndarray:
  """How surely a right candidate is among the first k, float64 [B, number of ks].

  It is 0 or 1, but where candidates have equal scores: their order counts as random.

  Args:
    scores: [B, K]; higher is better.
    right: bool [B, K]. The result is 0 if nothing is right or a right score is NaN.
    ks: numbers of candidates.
  """
  own = np.where(right, scores, -np.inf).max(axis=1, keepdims=True)  # [B, 1]; NaN stays
  tied = scores == own
  before = (~(scores <= own)).sum(axis=1)
  num_tied = tied.sum(axis=1)
  num_wrong = (tied & ~right).sum(axis=1)
  possible = right.any(axis=1) & ~np.isnan(own[:, 0])
  found = []
  for k in ks:
    # Without a right one, each place that the tied ones get has one of their wrong ones.
    miss = np.ones(len(scores))
    for i in range(k):
      is_place = i < np.minimum(k - before, num_tied)
      share = np.maximum(num_wrong - i, 0) / np.maximum(num_tied - i, 1)
      miss = np.where(is_place, miss * share, miss)
    found.append(np.where(possible, 1 - miss, 0.0))
  return np.stack(found, axis=1)


def class_hit_rates(
  scores: np.ndarray, labels: np.ndarray, label_weight: np.ndarray | None, ks: Sequence[int]
) -> np.ndarray:
  """`hit_rates` [B, number of ks] of the class with the most votes, see `votes.majority_shares`.

  Labels and weights [B, L] are as in `votes.shares`; a row without labels has zeros.
  """
  num_classes = scores.shape[1]
  most = votes.majority_shares(votes.shares(labels, num_classes, label_weight))  # [B, K]
  weight = np.where(labels >= 0, np.take_along_axis(most, np.maximum(labels, 0), axis=1), 0.0)
  weight /= (labels[:, :, None] == labels[:, None, :]).sum(axis=2)  # a class is listed repeatedly
  found = np.zeros((len(scores), len(ks)))
  for label, share in zip(labels.T, weight.T, strict=True):
    right = label[:, None] == np.arange(num_classes)
    found += share[:, None] * hit_rates(scores, right, ks)
  return found


def embedding_hit_rates(
  queries: np.ndarray, candidates: np.ndarray, right: 'sparse.csr_array', ks: Sequence[int]
) -> np.ndarray:
  """`hit_rates` of the dot products of embeddings, a block of queries at a time: [N, number of ks].

  Args:
    queries: [N, D].
    candidates: [M, D]. Equal rows have equal scores, to the bit.
    right: bool [N, M], sparse.
    ks: numbers of candidates.
  """
  # The rounding of a column may depend on its position, so equal candidates are computed once.
  distinct, column = np.unique(np.asarray(candidates, np.float32), axis=0, return_inverse=True)
  queries = np.asarray(queries, np.float32)
  column = column.reshape(-1)
  block = max(1, _BLOCK_ELEMENTS // len(candidates))
  found = []
  for start in range(0, len(queries), block):
    rows = slice(start, start + block)
    scores = (queries[rows] @ distinct.T)[:, column]
    found.append(hit_rates(scores, right[rows].toarray(), ks))
  return np.concatenate(found)


def retrieval_recall(
  image_embeddings: np.ndarray,
  caption_embeddings: np.ndarray,
  caption_image: np.ndarray,
  caption_text: np.ndarray,
  *,
  identical_captions_right: bool = False,
  ks: Sequence[int] = RECALL_AT,
) -> Recall:
  """Recall at k from images to captions and from captions to images.

  As is usual for Flickr30k and COCO, a caption is right only for the image that it was written for:
  an equal caption of another image is wrong, and which of the two comes first counts as random.
  With `identical_captions_right`, which suits captions made of class names, a caption is right for
  all images that have an equal caption.

  Args:
    image_embeddings: float32 [N, D].
    caption_embeddings: float32 [M, D].
    caption_image: int [M], the image of each caption. An image may have several captions, or none:
      then it is a candidate but no query.
    caption_text: int [M], equal for equal captions.
    identical_captions_right: whether equal captions of other images are right.
    ks: numbers of answers.
  """
  N = len(image_embeddings)
  M = len(caption_embeddings)
  if not M or caption_image.shape != (M,) or caption_text.shape != (M,):
    raise ValueError(
      f'{M} captions cannot have the images {list(caption_image.shape)} and texts '
      f'{list(caption_text.shape)}: both must be [{M}], and M at least 1'
    )
  if caption_image.min() < 0 or caption_image.max() >= N:
    raise ValueError(
      f'caption_image goes from {caption_image.min()} to {caption_image.max()}; it must lie in '
      f'0 .. {N - 1}'
    )
  from scipy import sparse  # here, so that a training starts sooner

  distinct, text = np.unique(caption_text, return_inverse=True)
  owner = sparse.csr_array((np.ones(M, bool), (np.arange(M), caption_image)), shape=(M, N))
  if identical_captions_right:
    says = sparse.csr_array((np.ones(M, np.int32), (np.arange(M), text.reshape(-1))))
    owner = (says @ (says.T @ owner.astype(np.int32))).astype(bool).tocsr()

  def found(queries: np.ndarray, candidates: np.ndarray, right: Any) -> dict[int, float]:
    return mean_hits(embedding_hit_rates(queries, candidates, right, ks), ks)

  images = np.unique(caption_image)
  of_image = owner.T.tocsr()[images]
  return Recall(
    found(image_embeddings[images], caption_embeddings, of_image),
    found(caption_embeddings, image_embeddings, owner),
    num_images=N,
    num_captions=M,
    captions_alike=M - len(distinct),
  )


def mean_hits(rates: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
  """{k: the mean over the queries} of `hit_rates` [N, number of ks]."""
  return dict(zip(ks, rates.mean(axis=0).tolist(), strict=True))
