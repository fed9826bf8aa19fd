"""A completion script for bash of the command het-plugin."""

import importlib
from collections.abc import Iterable

from absl import flags

_SCRIPT = """_het_plugin() {{
  local words word="${{COMP_WORDS[COMP_CWORD]}}"
  case "$COMP_CWORD ${{COMP_WORDS[1]}}" in
    1\\ *) words="{names}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
}}
complete -o default -F _het_plugin het-plugin
"""


def script(names: Iterable[str]) -> str:
  """The script for commands of these names."""
  names = list(names)
  cases = [f'    *\\ {name}) words="{" ".join(_flags_of(name))}" ;;' for name in names]
  return _SCRIPT.format(names=' '.join(names), cases='\n'.join(cases))


def _flags_of(name):
  command = importlib.import_module(f'het_plugin.commands.{name}')
  before = set(flags.FLAGS)
  command.Settings.define_flags()
  own = sorted(set(flags.FLAGS) - before)
  words = [f'--{flag}' + '=' * (not flags.FLAGS[flag].boolean) for flag in own]
  for flag in own:  # the next command may define flags of the same names
    delattr(flags.FLAGS, flag)
  return [*words, '--help']
