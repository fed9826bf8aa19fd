"""Evaluation of representations: extraction over the mesh, few-shot linear accuracy."""

from het_plugin.evaluation.fewshot import BIG_VISION_L2, L2_GRID, FewShotResult, few_shot

__all__ = ['BIG_VISION_L2', 'L2_GRID', 'FewShotResult', 'few_shot']
