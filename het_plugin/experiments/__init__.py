"""What launches sets of training runs: the quick start and the fine-tuning of `select`."""

from het_plugin.system import faces

__getattr__ = faces.on_first_use(__name__)
