"""python -m het_plugin.soup is het-plugin soup."""

from het_plugin.__main__ import alias

alias(__name__, 'soup')
