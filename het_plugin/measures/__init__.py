"""Measures: functions of arrays that return numbers with their errors.

They need numpy, scipy and scikit-learn, and know neither JAX nor files nor flags. N examples,
K classes, D features.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
  from het_plugin.measures import agreement, audit, rankme, uncertainty, votes
  from het_plugin.measures.fewshot import few_shot
