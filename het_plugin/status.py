"""python -m het_plugin.status is het-plugin status."""

from het_plugin.__main__ import alias

alias(__name__, 'status')
