"""What launches sets of training runs: the quick start and the fine-tuning of `select`."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from het_plugin.experiments import trainings
