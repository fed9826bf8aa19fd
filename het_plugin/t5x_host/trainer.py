"""t5x's trainer, with the checks of ours."""

from typing import Any

from t5x import trainer


class Trainer(trainer.Trainer):
  """t5x's; it refuses microbatches that would train another model without a word.

  The optimizer has its own schedule: `learning_rate_fn` is for t5x's log.
  """

  def __init__(self, model: Any, *args: Any, num_microbatches: int | None = None, **kwargs: Any):
    """As t5x's.

    Raises:
      ValueError: microbatches with a model whose loss compares the whole batch, or whose loss is a
        mean: t5x adds the gradients of microbatches up.
    """
    if (num_microbatches or 1) > 1:
      name = type(model).__name__
      if getattr(model, 'needs_whole_batch', False):
        raise ValueError(
          f'Trainer.num_microbatches={num_microbatches} must be 1: the loss of {name} compares '
          'every example with the whole batch.'
        )
      if getattr(model, 'loss_normalizing_factor', 1) is None:
        raise ValueError(
          f'Trainer.num_microbatches={num_microbatches} adds {num_microbatches} gradients up: bind '
          f'{name}.loss_normalizing_factor = %BATCH_SIZE, so that they are those of parts.'
        )
    super().__init__(model, *args, num_microbatches=num_microbatches, **kwargs)
