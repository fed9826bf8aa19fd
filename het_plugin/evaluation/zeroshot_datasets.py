"""The data sets of a zero-shot evaluation, and the accuracy of a contrastive model on them."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from het_plugin.data import DatasetConfig, TaskInfo, classification_info, task_info
from het_plugin.evaluation import prompts
from het_plugin.measures import votes, zeroshot
from het_plugin.rows import Rows, of_batch, ordered
from het_plugin.runs.per_example import Columns, PerExample
from het_plugin.runs.run import Run

_TOP = (1, 5)  # the k of `zeroshot.Accuracy`
_ROWS = 64  # whose hits are computed at once, from several arrays [rows, K] of float64


@dataclasses.dataclass(frozen=True)
class ZeroShotDataset:
  """A task to evaluate on: classification if it has classes, retrieval if it has captions.

  Attributes:
    name: names its results.
    task: name of a task of classes or of captions.
    split: a split, or a slice of one, 'test[:2000]'.
    templates: prompt templates, see `prompts.get_templates`.
    class_names: in place of the task's own, in the order of the labels: names, or the path of a
      text file with one name per line.
    lower: whether class names are lower-cased.
    max_examples: largest number of examples of the split, a fixed random choice (of an endless
      split, the first ones); None for all.
    resize: 'squash' or 'aspect', see DatasetConfig; None for the task's own.
    identical_captions_right: for captions, see `zeroshot.retrieval_recall`.
  """

  name: str
  task: str
  split: str = 'test'
  templates: str | tuple[str, ...] = 'photo'
  class_names: str | tuple[str, ...] | None = None
  lower: bool = False
  max_examples: int | None = None
  resize: Literal['aspect', 'squash'] | None = None
  identical_captions_right: bool = False


# glyphs_heldout has characters and faces that are in no training split.
DEFAULT_DATASETS = (
  ZeroShotDataset('glyphs_heldout', 'glyphs_heldout', templates='none', lower=True),
  ZeroShotDataset('glyphs_core', 'glyphs_core', 'validation', templates='none', lower=True),
)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Maps N texts to the token ids that a text tower takes, int32 [N, L], padded with 0."""

  vocabulary: Any  # see `data.get_vocabulary`
  length: int  # L

  @property
  def vocab_size(self) -> int:
    from het_plugin.data import get_vocabulary

    return get_vocabulary(self.vocabulary).vocab_size

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    from het_plugin.data import tokenize  # imports TensorFlow, which takes seconds

    return tokenize(self.vocabulary, texts, self.length)


def run_tokenizer(dataset_cfg: DatasetConfig) -> Tokenizer:
  """The tokenizer of a model's training data; raises ValueError if they have no captions."""
  length = dataset_cfg.task_feature_lengths.get('text')
  if length is None:
    raise ValueError(
      f'task_feature_lengths={dict(dataset_cfg.task_feature_lengths)} of the training data has no '
      "'text': zero-shot evaluation needs a model that is trained on captions"
    )
  from het_plugin.data import tasks  # fonts and image files take time to import

  vocabulary = dataset_cfg.vocabulary or tasks.own_vocabulary(dataset_cfg.mixture_or_task_name)
  return Tokenizer(vocabulary, length)


@dataclasses.dataclass(frozen=True)
class ZeroShotEvaluator:
  """Evaluates runs; compiles once per run and number of classes.

  All processes call its methods with the same arguments.

  Attributes:
    tokenizer: the tokenizer of the model's training.
    batch_size: global batch, of images and of texts.
    num_samples: number of samples of the noise under which classes are ranked by their probability
      (Collier et al. 2023, appendix M); not for captions. 0 ranks by the deterministic embeddings.
  """

  tokenizer: Tokenizer
  batch_size: int
  num_samples: int = 0

  def check(self, run: Run, dataset: ZeroShotDataset) -> int:
    """Checks model, data set and settings before anything is compiled or read.

    Args:
      run: its model has `image_embeddings(params, batch) -> [B, D]` and `text_embeddings(params,
        text int32 [N, L]) -> [N, D]`; with num_samples also `class_log_prob(params, batch,
        class_embeddings [K, D], num_samples) -> [B, K]`. Its parameters are not used yet.
      dataset: what the run will be evaluated on.

    Returns:
      The size of the data set.
    """
    check_model(run.model, self.num_samples)
    run.partitioner.check_batch_size(self.batch_size)
    if not has_captions(dataset):
      _class_names(dataset)
      prompts.get_templates(dataset.templates)
    elif self.num_samples:
      raise ValueError(
        f'num_samples={self.num_samples} is for classes; {dataset.task!r} has captions, which are '
        'found by the deterministic embeddings: set 0'
      )
    with self._open(run, dataset) as (_, num_examples):
      return num_examples

  def __call__(
    self,
    run: Run,
    dataset: ZeroShotDataset,
    on_rows: Callable[[int], None] = lambda number: None,
  ) -> zeroshot.Accuracy | zeroshot.Recall:
    """Accuracy or recall of a run on a data set; `on_rows` gets the number of images of batches."""
    evaluate = self._retrieve if has_captions(dataset) else self._classify
    return evaluate(run, dataset, on_rows)

  def _classify(
    self, run: Run, dataset: ZeroShotDataset, on_rows: Callable[[int], None]
  ) -> zeroshot.Accuracy:
    model = run.model
    num_samples = self.num_samples
    info = classification_info(dataset.task)
    multi_label = info.multi_label and not info.annotators

    def scores_of(given: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
      params = given['params']
      classes = given['classes']  # [K, D]
      if num_samples:
        return {'scores': model.class_log_prob(params, batch, classes, num_samples)}
      return {'scores': similarity(model.image_embeddings(params, batch), classes)}

    def hits(columns: Columns) -> np.ndarray:
      scores = columns['scores'].astype(np.float32)  # [n, K]
      if multi_label:
        right = votes.indicator(columns['label'], len(names))
        return zeroshot.hit_rates(scores, right, _TOP)
      # Several labels are votes or shares of them.
      weight = columns.get('label_weight')
      return zeroshot.class_hit_rates(scores, columns['label'], weight, _TOP)

    names = _class_names(dataset)
    templates = prompts.get_templates(dataset.templates)
    tokens = (self.tokenizer(prompts.fill(x, names)) for x in templates)
    embeddings, alike = zeroshot.class_embeddings(functools.partial(self._embed, run), tokens)
    replicated = NamedSharding(run.partitioner.mesh, PartitionSpec())
    classes = jax.make_array_from_callback(embeddings.shape, replicated, lambda i: embeddings[i])
    specs = {'params': run.param_specs, 'classes': PartitionSpec()}
    compute = run.per_example(('zeroshot.scores', num_samples), scores_of, specs)
    given = {'params': run.params, 'classes': classes}
    rows = self._read(run, compute, given, dataset, on_rows, hits)
    missing = int((rows.labels < 0).all(axis=1).sum())
    if missing and not multi_label:  # the test split of ImageNet, for example
      raise ValueError(
        f'{missing} of the {len(rows)} examples of {dataset.task} have no label in the split '
        f'{dataset.split!r}: choose another split'
      )
    found = zeroshot.mean_hits(rows['hits'], _TOP)
    return zeroshot.Accuracy(found[1], found[5], len(rows), len(names), alike)

  def _retrieve(
    self, run: Run, dataset: ZeroShotDataset, on_rows: Callable[[int], None]
  ) -> zeroshot.Recall:
    def embed_images(params: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
      image = run.model.image_embeddings(params, batch).astype(jnp.float32)
      return {'image': image, 'text': batch['text'], 'digest': batch['digest']}

    compute = run.per_example('zeroshot.images', embed_images)
    rows = self._read(run, compute, run.params, dataset, on_rows)
    # Data sets of pairs repeat an image with several captions.
    _, image, image_of = np.unique(rows['digest'], axis=0, return_index=True, return_inverse=True)
    texts, text_of = np.unique(rows['text'], axis=0, return_inverse=True)
    image_of = image_of.reshape(-1)
    text_of = text_of.reshape(-1)
    return zeroshot.retrieval_recall(
      rows['image'][image],
      self._embed(run, texts)[text_of],
      image_of,
      text_of,
      identical_captions_right=dataset.identical_captions_right,
    )

  def _read(
    self,
    run: Run,
    compute: PerExample,
    params: Any,
    dataset: ZeroShotDataset,
    on_rows: Callable[[int], None],
    hits: Callable[[Columns], np.ndarray] | None = None,
  ) -> Rows:
    """The columns of all examples, in the order of their ids; `hits` of scores in place of them."""
    parts = []
    with self._open(run, dataset) as (batches, _):
      if has_captions(dataset):
        batches = ({**batch, 'digest': digests(batch['image'])} for batch in batches)
      for found in compute(params, batches, self.batch_size, dataset.max_examples):
        if hits:
          starts = range(0, max(1, len(found['scores'])), _ROWS)
          blocks = ({name: x[i : i + _ROWS] for name, x in found.items()} for i in starts)
          found['hits'] = np.concatenate([*map(hits, blocks)])
          del found['scores']
        unlabelled = np.full((len(found['index']), 1), -1, np.int32)
        parts.append(of_batch({'label': unlabelled, **found}))
        on_rows(len(found['index']))
    return ordered(parts)

  def _embed(self, run: Run, tokens: np.ndarray) -> np.ndarray:
    """float32 [N, D] of token ids int32 [N, L]."""
    own = run.partitioner.batch_rows(self.batch_size)
    last = len(tokens) - 1

    def embed_texts(params: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
      return {'text': run.model.text_embeddings(params, batch['text']).astype(jnp.float32)}

    def batches() -> Iterator[dict[str, np.ndarray]]:
      for start in range(0, len(tokens), self.batch_size):
        rows = start + own
        # The last text fills the last batch, so that no text is empty.
        yield {'text': tokens[np.minimum(rows, last)], 'mask': (rows <= last).astype(np.float32)}

    compute = run.per_example('zeroshot.texts', embed_texts)
    found = compute(run.params, batches(), self.batch_size)
    return np.concatenate([rows['text'] for rows in found])

  def _open(self, run: Run, dataset: ZeroShotDataset) -> contextlib.AbstractContextManager:
    features: dict[str, Any] = {}
    if has_captions(dataset):
      features = {'text_length': self.tokenizer.length, 'vocabulary': self.tokenizer.vocabulary}
    return run.open_split(
      dataset.split,
      dataset.max_examples,
      task=dataset.task,
      batch_size=self.batch_size,
      resize=dataset.resize,
      **features,
    )


def has_captions(dataset: ZeroShotDataset) -> bool:
  """Whether the task has captions instead of classes; raises ValueError for an unknown task."""
  return not isinstance(task_info(dataset.task), TaskInfo)


def check_model(model: Any, num_samples: int = 0) -> None:
  """Raises ValueError if the model cannot embed images and texts, or draw samples if wanted."""
  needed = ['image_embeddings', 'text_embeddings', *(['class_log_prob'] if num_samples else [])]
  if missing := [name for name in needed if not hasattr(model, name)]:
    raise ValueError(
      f'{type(model).__name__} has no {missing[0]}: zero-shot evaluation needs a contrastive model'
    )


def similarity(queries: jax.Array, candidates: jax.Array) -> jax.Array:
  """Dot products of rows in full float32 precision, [N, M], on accelerators too."""
  return jnp.einsum(
    'nd,md->nm',
    queries.astype(jnp.float32),
    candidates.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )


def digests(images: np.ndarray) -> np.ndarray:
  """int32 [B, 4] that are equal for images [B, ...] of equal pixels."""
  found = [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in images]
  return np.frombuffer(b''.join(found), np.int32).reshape(-1, 4)


def _class_names(dataset: ZeroShotDataset) -> tuple[str, ...]:
  info = classification_info(dataset.task)
  names = prompts.readable_names(
    dataset.task, info.class_names, dataset.class_names, info.num_classes
  )
  return tuple(name.lower() for name in names) if dataset.lower else names
