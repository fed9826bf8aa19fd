"""python -m het_plugin.finetune is het-plugin finetune."""

from het_plugin.__main__ import alias

alias(__name__, 'finetune')
