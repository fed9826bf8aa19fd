"""python -m het_plugin.plan is het-plugin plan."""

from het_plugin.__main__ import alias

alias(__name__, 'plan')
