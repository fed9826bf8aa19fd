"""A file for each command: source -> rows -> measure -> report; and evaluations during training."""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:
  from het_plugin.evaluation import (
    candidates,
    class_covariance,
    examples,
    fewshot,
    uncertainty_report,
    zeroshot_datasets,
  )
  from het_plugin.evaluation.uncertainty_report import Evaluation
  from het_plugin.evaluation.zeroshot_datasets import ZeroShotDataset, ZeroShotEvaluator

CONFIGURABLES = {
  'actions': ('FewShotAction', 'ZeroShotAction'),
  'fewshot': ('FewShotDataset',),
  'zeroshot_datasets': ('ZeroShotDataset', 'run_tokenizer'),
}

__getattr__, __all__ = faces.on_first_use(__name__)
