"""python -m het_plugin.evaluate is het-plugin evaluate."""

from het_plugin.__main__ import alias

alias(__name__, 'evaluate')
