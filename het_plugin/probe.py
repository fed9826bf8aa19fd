"""python -m het_plugin.probe is het-plugin probe."""

from het_plugin.__main__ import alias

alias(__name__, 'probe')
