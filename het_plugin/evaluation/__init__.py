"""A file for each command: source -> rows -> measure -> report; and evaluations during training."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from het_plugin.evaluation import (
    candidates,
    class_covariance,
    examples,
    fewshot,
    uncertainty_report,
    zeroshot,
    zeroshot_datasets,
  )
  from het_plugin.evaluation.uncertainty_report import Evaluation
  from het_plugin.evaluation.zeroshot_datasets import ZeroShotDataset, ZeroShotEvaluator

CONFIGURABLES = {
  'actions': ('FewShotAction', 'ZeroShotAction'),
  'fewshot': ('FewShotDataset',),
  'zeroshot_datasets': ('ZeroShotDataset', 'run_tokenizer'),
}
