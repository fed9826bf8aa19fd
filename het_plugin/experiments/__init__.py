"""What launches sets of training runs: the quick start and the fine-tuning of `select`."""

from typing import TYPE_CHECKING

from het_plugin.system import faces

if TYPE_CHECKING:
  from het_plugin.experiments import trainings

__getattr__, _ = faces.on_first_use(__name__)
