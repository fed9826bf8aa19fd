"""Build hook: ships the top-level gin/ tree inside the wheel, as the package `het_plugin.gin`.

gin resolves `include "het_plugin/gin/heads/het_xl.gin"` through regular packages only, so there
every directory gets an `__init__.py`. The source tree must not have them: they would shadow the gin
library.
"""

import shutil
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GinTreeHook(BuildHookInterface):
  """Copies gin/ aside, with the files of packages, for the time of a build."""

  def initialize(self, version, build_data):
    if version == 'editable':  # An editable install reads the checkout's gin/ itself.
      return
    self._staging = tempfile.TemporaryDirectory()
    tree = Path(self._staging.name, 'gin')
    shutil.copytree(Path(self.root, 'gin'), tree)
    for directory in [tree, *(path for path in tree.rglob('*') if path.is_dir())]:
      (directory / '__init__.py').touch()
    build_data['force_include'][str(tree)] = 'het_plugin/gin'

  def finalize(self, version, build_data, artifact_path):
    if version != 'editable':
      self._staging.cleanup()
