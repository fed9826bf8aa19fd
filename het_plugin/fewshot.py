"""python -m het_plugin.fewshot is het-plugin fewshot."""

from het_plugin.__main__ import alias

alias(__name__, 'fewshot')
