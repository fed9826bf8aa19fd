"""Evaluation of representations: extraction over the mesh, few-shot linear accuracy."""

from het_plugin.evaluation.fewshot import few_shot

CONFIGURABLES = {
  'actions': ('FewShotAction', 'ZeroShotAction'),
  'fewshot_datasets': ('FewShotDataset',),
  'zeroshot_datasets': ('ZeroShotDataset', 'run_tokenizer'),
}

__all__ = ['few_shot']
