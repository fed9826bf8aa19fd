"""Zero-shot accuracies of a contrastive model while it is being trained."""

from collections.abc import Sequence

from het_plugin.evaluation import zeroshot
from het_plugin.evaluation.periodic_action import PeriodicAction, Row
from het_plugin.evaluation.zeroshot_datasets import (
  DEFAULT_DATASETS,
  Tokenizer,
  ZeroShotDataset,
  ZeroShotEvaluator,
  check_model,
)
from het_plugin.training.actions import ActionContext
from het_plugin.training.state import TrainState


class ZeroShotAction(PeriodicAction):
  """Zero-shot classification and retrieval (`zeroshot.py`) during training.

  The scalars are top1 and top5, for captions image_to_text/recall1 and so on, in [0, 1]. Classes
  are embedded again each time. `results` holds the latest {name: Accuracy or Recall}.
  """

  kind = 'zeroshot'

  def __init__(
    self,
    image_size: int,
    channels: int,
    tokenizer: Tokenizer,
    batch_size: int = 256,
    datasets: Sequence[ZeroShotDataset] = DEFAULT_DATASETS,
    num_samples: int = 0,
    period: int | None = None,
    total_steps: int | None = None,
  ):
    """Sets the evaluation up; reads and compiles nothing yet.

    Args:
      image_size: side of the square images that the model takes, in pixels.
      channels: image channels that the model takes; grey data are repeated, colours averaged.
      tokenizer: that of the training; in gin `@run_tokenizer()`, of `@train/DatasetConfig()`.
      batch_size: global batch, of images and of texts.
      datasets: what to evaluate on.
      num_samples: see `ZeroShotEvaluator`.
      period, total_steps: see `PeriodicAction`.

    Raises:
      ValueError: a setting is out of range, or two data sets have the same name.
    """
    super().__init__(datasets, period, total_steps)
    self._settings = {
      'tokenizer': tokenizer,
      'image_size': image_size,
      'channels': channels,
      'batch_size': batch_size,
      'num_samples': num_samples,
    }
    self._evaluator: ZeroShotEvaluator | None = None
    self.results: dict[str, zeroshot.Accuracy | zeroshot.Recall] = {}

  def setup(self, context: ActionContext) -> None:
    """Checks the model and the data sets, and finds out what an earlier run has evaluated.

    Raises:
      ValueError: the model is not contrastive; and as `ZeroShotEvaluator.check`.
    """
    check_model(context.model, self._settings['num_samples'])
    super().setup(context)
    checker = ZeroShotEvaluator(context.model, context.partitioner, None, **self._settings)
    for dataset in self._datasets:
      checker.check(dataset)

  def evaluate(self, train_state: TrainState) -> list[Row]:
    if self._evaluator is None:
      partitioner = self._context.partitioner
      specs = partitioner.get_mesh_axes(train_state).params
      self._evaluator = ZeroShotEvaluator(self._context.model, partitioner, specs, **self._settings)
    self.results = {
      dataset.name: self._evaluator(dataset, train_state.params) for dataset in self._datasets
    }
    return [Row(name, x.scalars(), x.record()) for name, x in self.results.items()]
