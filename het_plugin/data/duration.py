"""The length of a training run: in steps, in examples or in epochs."""

import importlib

from het_plugin.data import splits
from het_plugin.data.pipeline import DatasetConfig, task_info


def total_steps(
  dataset: DatasetConfig, steps: int | None = None, examples: int | None = None
) -> int:
  """Number of training steps. Exactly one of steps, examples and dataset.num_epochs must be set.

  Epochs are exact: each example is read num_epochs times, and the last batch is padded with rows
  that do not count. A number of examples is rounded up to whole batches.

  Raises:
    ValueError: none or several of the three are set, or num_epochs is set for an endless split.
  """
  lengths = {'steps': steps, 'examples': examples, 'num_epochs': dataset.num_epochs}
  given = [f'{name}={value}' for name, value in lengths.items() if value is not None]
  if len(given) != 1:
    raise ValueError(
      f'The length of the run is given by {" and ".join(given) or "nothing"}; exactly one of steps '
      '(TRAIN_STEPS), examples (TRAIN_EXAMPLES) and num_epochs (TRAIN_EPOCHS) must be set, the '
      'others None.'
    )
  if steps is not None:
    return steps
  if examples is None:
    if dataset.module:
      importlib.import_module(dataset.module)
    task = dataset.mixture_or_task_name
    num_records = splits.resolve(dataset.split, task_info(task).splits, str(task)).num_records
    if num_records is None:
      raise ValueError(
        f'num_epochs={dataset.num_epochs}, but the split {dataset.split!r} of {task} is endless: '
        'give the length of the run in steps or examples.'
      )
    examples = dataset.num_epochs * num_records
  elif examples < 1:
    raise ValueError(f'examples={examples} must be at least 1.')
  return -(-examples // dataset.batch_size)
