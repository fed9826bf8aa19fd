"""python -m het_plugin.zeroshot is het-plugin zeroshot."""

from het_plugin.__main__ import alias

alias(__name__, 'zeroshot')
