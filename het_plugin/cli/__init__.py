"""The command line: flags, one sentence for a wrong setting, completion.

A command imports this room first. It needs neither jax nor gin, so that --help answers at once.
"""

from het_plugin.system import versions

versions.check('absl', 'etils')
