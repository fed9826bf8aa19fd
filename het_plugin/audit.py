"""python -m het_plugin.audit is het-plugin audit."""

from het_plugin.__main__ import alias

alias(__name__, 'audit')
