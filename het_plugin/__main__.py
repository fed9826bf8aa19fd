"""het-plugin COMMAND, or python -m het_plugin COMMAND: every main of this package by its name.

    het-plugin train --gin_file=gin/runs/digits_smoke.gin --gin_file=gin/heads/het_xl.gin \\
      --gin.MODEL_DIR="'runs/digits'"
    het-plugin train --help
    source <(het-plugin completion)    # bash completes commands and flags
"""

import ast
import difflib
import importlib
import os
import sys
from pathlib import Path

import het_plugin
from het_plugin.system import stopping, versions

_STOPPABLE = ('train', 'quickstart', 'represent', 'probe', 'audit')  # by a signal


def commands() -> dict[str, str]:
  """{name: first line of its documentation} of the mains."""
  files = {path.stem: path.read_text() for path in sorted(Path(__file__).parent.glob('[a-z]*.py'))}
  mains = {name: text for name, text in files.items() if "__name__ == '__main__'" in text}
  return {name: ast.get_docstring(ast.parse(text)).splitlines()[0] for name, text in mains.items()}


def main() -> None:
  known = commands()
  command = sys.argv[1] if len(sys.argv) > 1 else '--help'
  if command == '--version':
    print(het_plugin.__version__)
  elif command == 'completion':
    from het_plugin.cli import completion

    print(completion.script(known), end='')
  elif command in ('--help', '-h', 'help'):
    print(f'{__doc__}\n' + '\n'.join(f'  {name:<12}{text}' for name, text in known.items()))
  elif command in ('ablate', 'tune'):
    print(f'Error: in a checkout, {command} is python -m studies.{command}', file=sys.stderr)
    sys.exit(2)
  elif command not in known:
    similar = difflib.get_close_matches(command, known, 1)
    hint = f'did you mean {similar[0]}?' if similar else f'choose from {", ".join(known)}'
    print(f'Error: {command} is not a command: {hint}', file=sys.stderr)
    sys.exit(2)
  else:
    sys.argv = [f'het-plugin {command}', *sys.argv[2:]]
    if not sys.flags.safe_path:
      sys.path.append(os.getcwd())  # for modules that gin files import, as with python -m
    if command in _STOPPABLE:
      stopping.install()  # the imports below take seconds
    if problem := versions.unsupported():
      print(f'Error: {problem}', file=sys.stderr)
      sys.exit(2)
    try:
      chosen = importlib.import_module(f'het_plugin.{command}')
      from het_plugin.cli import command_line
    except ModuleNotFoundError as error:  # the extra `train` is not installed
      hint = '' if 'pip install' in str(error) else ": pip install 'het_plugin[train]'"
      print(f'Error: {error}{hint}', file=sys.stderr)
      sys.exit(2)
    command_line.run(chosen.main)


if __name__ == '__main__':
  main()
