"""Evaluation of representations: extraction over the mesh, few-shot linear accuracy."""

from het_plugin.evaluation.fewshot import (
  BIG_VISION_L2,
  L2_GRID,
  PROTOCOLS,
  FewShotResult,
  Protocol,
  Split,
  few_shot,
  few_shot_all,
)

CONFIGURABLES = {
  'actions': ('FewShotAction', 'ZeroShotAction'),
  'fewshot_datasets': ('FewShotDataset',),
  'zeroshot_datasets': ('ZeroShotDataset', 'run_tokenizer'),
}

__all__ = [
  'BIG_VISION_L2',
  'L2_GRID',
  'PROTOCOLS',
  'FewShotResult',
  'Protocol',
  'Split',
  'few_shot',
  'few_shot_all',
]
