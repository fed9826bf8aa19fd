"""python -m het_plugin.select is het-plugin select."""

from het_plugin.__main__ import alias

alias(__name__, 'select')
