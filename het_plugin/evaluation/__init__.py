"""A file for each command: source -> rows -> measure -> report; and evaluations during training."""

from het_plugin.system import faces

CONFIGURABLES = {
  'actions': ('FewShotAction', 'ZeroShotAction'),
  'fewshot': ('FewShotDataset',),
  'zeroshot_datasets': ('ZeroShotDataset', 'run_tokenizer'),
}

__getattr__ = faces.on_first_use(
  __name__,
  {
    'uncertainty_report': ['Evaluation'],
    'zeroshot_datasets': ['ZeroShotDataset', 'ZeroShotEvaluator'],
  },
)
