"""Measures: functions of arrays that return numbers with their errors.

They need numpy, scipy and scikit-learn, and know neither JAX nor files nor flags. N examples,
K classes, D features.
"""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:
  from het_plugin.measures import agreement, audit, look_alikes, rankme, uncertainty, votes
  from het_plugin.measures.fewshot import few_shot

__getattr__, __all__ = faces.on_first_use(__name__)
