"""python -m het_plugin.train is het-plugin train."""

from het_plugin.__main__ import alias

alias(__name__, 'train')
