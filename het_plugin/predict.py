"""python -m het_plugin.predict is het-plugin predict."""

from het_plugin.__main__ import alias

alias(__name__, 'predict')
