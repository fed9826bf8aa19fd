"""python -m het_plugin.quickstart is het-plugin quickstart."""

from het_plugin.__main__ import alias

alias(__name__, 'quickstart')
