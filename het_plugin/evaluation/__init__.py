"""A file for each command: source -> rows -> measure -> report; and evaluations during training."""

CONFIGURABLES = {
  'actions': ('FewShotAction', 'ZeroShotAction'),
  'fewshot': ('FewShotDataset',),
  'zeroshot_datasets': ('ZeroShotDataset', 'run_tokenizer'),
}
