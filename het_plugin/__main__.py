"""het-plugin COMMAND, or python -m het_plugin.COMMAND: every command of this package by its name.

    het-plugin train --gin_file=gin/runs/digits_smoke.gin --gin_file=gin/heads/het_xl.gin \\
      --gin.MODEL_DIR="'runs/digits'"
    het-plugin train --help
    source <(het-plugin completion)    # bash completes commands and flags
"""

import difflib
import importlib
import os
import sys
from pathlib import Path

import het_plugin
from het_plugin.system import stopping, versions

_STOPPABLE = ('train', 'quickstart', 'represent', 'probe', 'noise_test', 'audit')  # by a signal


def commands() -> dict[str, str]:
  """{name: first line of its documentation} of the commands."""
  files = sorted((Path(__file__).parent / 'commands').glob('[a-z]*.py'))
  return {path.stem: path.open().readline().strip().strip('"') for path in files}


def alias(module: str, command: str) -> None:
  """Runs a command if its module is the program, `python -m het_plugin.train`."""
  if module == '__main__':
    main(command)


def main(command: str | None = None) -> None:
  """Runs the command, or the first word of the command line."""
  known = commands()
  words = sys.argv[1:] if command is None else [command, *sys.argv[1:]]
  command = words[0] if words else '--help'
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
    sys.argv = [f'het-plugin {command}', *words[1:]]
    if not sys.flags.safe_path:
      sys.path.append(os.getcwd())  # for modules that gin files import, as with python -m
    if command in _STOPPABLE:
      stopping.install()  # the imports below take seconds
    if problem := versions.unsupported():
      print(f'Error: {problem}', file=sys.stderr)
      sys.exit(2)
    try:
      chosen = importlib.import_module(f'het_plugin.commands.{command}')
      from het_plugin.cli import command_line
    except ModuleNotFoundError as error:  # the extra `train` is not installed
      hint = '' if 'pip install' in str(error) else ": pip install 'het_plugin[train]'"
      print(f'Error: {error}{hint}', file=sys.stderr)
      sys.exit(2)
    command_line.run_command(chosen)


if __name__ == '__main__':
  main()
