"""python -m het_plugin.noise_test is het-plugin noise_test."""

from het_plugin.__main__ import alias

alias(__name__, 'noise_test')
