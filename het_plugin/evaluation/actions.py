"""Evaluations while a model trains: few-shot and zero-shot accuracies."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from flax import errors
from jax.experimental import multihost_utils

from het_plugin.evaluation import fewshot as fewshot_data
from het_plugin.evaluation import zeroshot_datasets
from het_plugin.evaluation.names import check_names, naming
from het_plugin.measures import fewshot
from het_plugin.runs.run import Run
from het_plugin.system import ranges, run_files
from het_plugin.system.ranges import Count
from het_plugin.training.actions import ActionContext, BaseAction, MetricsByTask
from het_plugin.training.state import TrainState


@dataclasses.dataclass(kw_only=True, eq=False)
class PeriodicAction(BaseAction):
  """Evaluates periodically on data sets; for mode TRAIN_EVAL.

  Writes the scalars kind/<data set>/<scalar>, and a line per result to <model_dir>/kind.jsonl. A
  resumed run replaces the lines of steps that it repeats, and continues the period.

  Attributes:
    image_size, channels: side in pixels, and channels, of the images that the model takes.
    batch_size: global batch.
    datasets: data sets to evaluate on.
    period: the least number of steps between two evaluations; None evaluates at every call.
    total_steps: a step that is evaluated in any case.
  """

  kind: ClassVar[str]

  image_size: Count
  channels: Count
  batch_size: Count = 256
  datasets: Sequence[Any]
  period: Count | None = None
  total_steps: int | None = None

  def __post_init__(self):
    ranges.check(self)
    check_names(self.datasets, f'{type(self).__name__}.datasets')

  def setup(self, context: ActionContext) -> None:
    """Checks the data sets, and reads which steps an earlier run has evaluated."""
    self._context = context
    # Its parameters come with each evaluation; what is compiled for the first one stays.
    self._run = Run(
      context.model,
      context.partitioner,
      None,
      None,
      self.image_size,
      self.channels,
      checkpoint='the model',
      resize=context.resize,
    )
    for dataset in self.datasets:
      self.check(self._run, dataset)
    self._file = epath.Path(context.model_dir) / f'{self.kind}.jsonl'
    # All processes must agree on when to run, and only process 0 writes the file.
    steps = (record['step'] for record in run_files.read_lines(self._file))
    last_step = max((step for step in steps if step <= context.evaluated_step), default=-1)
    self._last_step = int(multihost_utils.broadcast_one_to_all(np.int32(last_step)))

  def run(self, train_state: TrainState, metrics_by_task: MetricsByTask) -> bool:
    """Evaluates if the step is due; never stops training."""
    del metrics_by_task
    step = int(train_state.step)
    never_yet = self._last_step < 0
    due = self.period is None or never_yet or step - self._last_step >= self.period
    if due or step == self.total_steps:
      params, specs = (
        getattr(x, 'eval_params', x.params)  # t5x's states have none
        for x in (train_state, self._context.partitioner.get_mesh_axes(train_state))
      )
      run = dataclasses.replace(self._run, params=params, param_specs=specs, step=step)
      results = self.evaluate(run)
      self._last_step = step
      self._context.writer.write_scalars(
        step,
        {f'{self.kind}/{name}/{k}': v for name, x in results for k, v in x.scalars().items()},
      )
      if jax.process_index() == 0:
        rows = [row for row in run_files.read_lines(self._file) if row['step'] < step]
        rows += [{'step': step, 'dataset': name, **x.record()} for name, x in results]
        run_files.write_text(self._file, ''.join(json.dumps(row) + '\n' for row in rows))
    return False

  def check_images(self, compute: Callable[[Any, dict], Any], settings: str = '') -> None:
    """Raises ValueError if `compute(params, batch)` does not take the images; compiles nothing.

    `settings`, of `compute`, are named before those of the images.
    """
    image = self.batch_size, self.image_size, self.image_size, self.channels
    # Where the training's shapes are not known, the parameters are taken to be for these images.
    shapes = {'image': image, 'text': (self.batch_size, 1), **self._context.input_shapes}

    def trace() -> Any:
      params = self._context.model.get_initial_variables(jax.random.key(0), shapes)['params']
      return compute(params, {'image': jnp.zeros(image)})

    of_images = f'image_size={self.image_size}, channels={self.channels}'
    try:
      with naming(f'{type(self).__name__}.{settings}{of_images}'):
        jax.eval_shape(trace)
    except errors.ScopeParamShapeError as error:
      _, side, _, channels = shapes['image']
      raise ValueError(
        f'{type(self).__name__}.{of_images} do not fit the model, which is trained with '
        f'image_size={side}, channels={channels}'
      ) from error

  def check(self, run: Run, dataset: Any) -> None:
    """Raises ValueError if the run does not fit a data set. The run has no parameters yet."""
    raise NotImplementedError

  def evaluate(self, run: Run) -> Sequence[tuple[str, Any]]:
    """(data set, result) pairs; every process calls it.

    The methods of a result give `scalars()` by name, and `record()`, the content of its line.
    """
    raise NotImplementedError


@dataclasses.dataclass(kw_only=True, eq=False)
class FewShotAction(PeriodicAction):
  """Fits linear classifiers to a layer's representations (`fewshot.py`) during training.

  The scalars are <shots>shot, in [0, 1], and with more than one draw <shots>shot_stderr. There is a
  line per data set and number of shots. `results` has the latest {name: {shots: FewShotResult}}.

  Attributes:
    shots, seeds, l2, classifier, draw: see `fewshot`.
    layer: name of the representation.
  """

  kind = 'fewshot'

  datasets: Sequence[fewshot_data.FewShotDataset] = fewshot_data.DEFAULT_DATASETS
  shots: Sequence[int] = (1, 5, 10, 25)
  seeds: Sequence[int] = (0, 1, 2)
  l2: fewshot.L2 = 'loo'
  classifier: fewshot.Classifier = 'ridge'
  draw: fewshot.Draw = 'random'
  layer: str = 'pre_logits'

  def __post_init__(self):
    super().__post_init__()
    self._protocol = fewshot.Protocol(self.classifier, self.draw, self.l2)
    fewshot.check_settings(self.shots, self.seeds, self.l2, len(self.datasets))
    self.results = {}

  def setup(self, context: ActionContext) -> None:
    super().setup(context)
    represent = functools.partial(context.model.representations, layers=(self.layer,))
    self.check_images(represent, f'layer={self.layer!r}, ')

  def check(self, run: Run, dataset: fewshot_data.FewShotDataset) -> None:
    fewshot_data.check(run, dataset, self.batch_size)

  def evaluate(self, run: Run) -> Sequence[tuple[str, Any]]:
    data = {x.name: fewshot_data.read(run, x, self.layer, self.batch_size) for x in self.datasets}
    self.results = fewshot.few_shot_all(data, self._protocol, shots=self.shots, seeds=self.seeds)
    results = [(name, x) for name, by_shots in self.results.items() for x in by_shots.values()]
    for name, x in results:
      if x.classes_short:
        logging.warning('%s, %dshot: %d classes have fewer images.', name, x.shots, x.classes_short)
    return results


@dataclasses.dataclass(kw_only=True, eq=False)
class ZeroShotAction(PeriodicAction):
  """Zero-shot classification and retrieval (`zeroshot.py`) during training.

  The scalars are top1 and top5, or for captions image_to_text/recall1 and so on, in [0, 1]. Classes
  are embedded again each time. `results` has the latest {name: Accuracy or Recall}.

  Attributes:
    tokenizer: the tokenizer of the training; in gin `@run_tokenizer()` of `@train/DatasetConfig()`.
    num_samples: see `ZeroShotEvaluator`.
  """

  kind = 'zeroshot'

  datasets: Sequence[zeroshot_datasets.ZeroShotDataset] = zeroshot_datasets.DEFAULT_DATASETS
  tokenizer: zeroshot_datasets.Tokenizer
  num_samples: Annotated[int, '[0, inf)'] = 0

  def __post_init__(self):
    super().__post_init__()
    self._evaluator = zeroshot_datasets.ZeroShotEvaluator(
      self.tokenizer, self.batch_size, self.num_samples
    )
    self.results = {}

  def setup(self, context: ActionContext) -> None:
    super().setup(context)
    self.check_images(context.model.image_embeddings)

  def check(self, run: Run, dataset: zeroshot_datasets.ZeroShotDataset) -> None:
    self._evaluator.check(run, dataset)

  def evaluate(self, run: Run) -> Sequence[tuple[str, Any]]:
    self.results = {x.name: self._evaluator(run, x) for x in self.datasets}
    return list(self.results.items())
