"""The command line of every main: flags, one sentence for a wrong setting, completion.

A main imports this room first. It needs neither jax nor gin, so that --help answers at once.
"""

from het_plugin.system import versions

versions.check('absl', 'etils')
