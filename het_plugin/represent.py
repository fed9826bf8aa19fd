"""python -m het_plugin.represent is het-plugin represent."""

from het_plugin.__main__ import alias

alias(__name__, 'represent')
