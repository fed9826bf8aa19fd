"""t5x's trainer with the checks of ours."""

from typing import Any

from t5x import trainer


class Trainer(trainer.Trainer):
  """t5x's Trainer, which refuses microbatches that would silently train another model.

  The optimizer has its own schedule; `learning_rate_fn` is only for t5x's log.
  """

  def __init__(self, model: Any, *args: Any, num_microbatches: int | None = None, **kwargs: Any):
    """Takes the arguments of t5x's Trainer.

    Raises:
      ValueError: there are microbatches, and the loss of the model compares the whole batch or is a
        mean; t5x adds up the gradients of microbatches.
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
          f'Trainer.num_microbatches={num_microbatches} sums {num_microbatches} gradients. Bind '
          f'{name}.loss_normalizing_factor = %BATCH_SIZE, so that the sum is the gradient of the '
          'batch.'
        )
    super().__init__(model, *args, num_microbatches=num_microbatches, **kwargs)
