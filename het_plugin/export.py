"""python -m het_plugin.export is het-plugin export."""

from het_plugin.__main__ import alias

alias(__name__, 'export')
