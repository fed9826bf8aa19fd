"""Shared by all commands: gin flags as in t5x, one sentence for a wrong setting, logging."""

import contextlib
import math
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType

from absl import app, flags, logging

from het_plugin import reporting
from het_plugin.cli.settings import ReportFolder
from het_plugin.system import distributed, exit_codes, run_files, screen, terminal

_FLAG_PREFIX = '--gin.'
_OUT_OF_MEMORY = re.compile('RESOURCE_EXHAUSTED')
# What is rather bound by a file of ours than by hand.
_OF_FILES = {'HEAD': 'gin/heads/het_xl.gin', 'BACKBONE': 'gin/models/vit_s_16.gin'}
# What gin adds to Python's error where a call lacks an argument that no binding gives.
_UNBOUND = re.compile(
  r"No values supplied by Gin or caller for arguments: \['(\w+)'.*?In call to configurable '(\w+)'",
  re.DOTALL,
)
_SCHEME = re.compile(r"'(\w+://)'")
_HELP = {'--help', '-h', '-help', '--helpshort', '--helpfull'}
_WRITTEN = ('csv', 'html', 'json', 'png', 'suggest')  # flags that name a file of results
_REPLACED = (*_WRITTEN, 'output', 'output_dir', 'write_pred_probs')
# Modules whose flags --help shows.
_SHARED = ('het_plugin.cli.settings', 'het_plugin.system')  # after those of the command
_OURS = ('het_plugin', 'launch', 'benchmarks', 'studies', '__main__')


def rewrite_flags(argv: Sequence[str]) -> list[str]:
  """Turns --gin.NAME=VALUE into --gin_bindings=NAME=VALUE, which absl can parse."""
  rewritten = [argv[0]]
  for argument in argv[1:]:
    if argument.startswith(_FLAG_PREFIX):
      name, equals, value = argument.removeprefix(_FLAG_PREFIX).partition('=')
      if not equals:
        raise flags.Error(f'{argument} lacks its value: write {argument}=VALUE')
      argument = f'--gin_bindings={name} = {value}'
    rewritten.append(argument)
  return rewritten


def one_sentence(error: BaseException) -> str:
  """An error's message on one line, without the call sites that gin appends to it."""
  text = str(error).strip() or type(error).__name__
  name = None
  if unbound := re.match(r"No bindings specified for '(.+)/gin\.macro'", text):
    name = unbound[1]
  elif unbound := _UNBOUND.search(text):
    name = f'{unbound[2]}.{unbound[1]}'
  if name in _OF_FILES:
    return f'{name} is not set: give a file that binds it, such as --gin_file={_OF_FILES[name]}'
  if name:
    return (
      f'{name} is not set: bind it in a file or with --gin.{name}=VALUE, text in its own quotes'
    )
  lines = [line.strip() for line in text.splitlines()]
  lines = [line for line in lines if line and not line.startswith('In call to configurable')]
  if isinstance(error, ModuleNotFoundError) and error.name == 't5x':
    lines.append('(docs/t5x.md says how to install it)')
  said = ' '.join(lines)
  if 'gin' in sys.modules:  # else no binding was read
    from het_plugin.config import parsing

    said = parsing.as_typed(said)
  return terminal.printable(said)


@contextlib.contextmanager
def one_sentence_errors(argv: Sequence[str] = ()):
  """Ends the program with one line and exit code 2 if a setting is wrong or asks for more memory
  than there is.

  `--verbosity=1` gives the traceback instead. `argv` is that of a main that takes flags only.
  """
  if argv[1:]:
    unknown = f'unknown arguments {" ".join(argv[1:])}: flags begin with --'
    print(f'Error: {unknown} (--help shows the flags)', file=sys.stderr)
    sys.exit(exit_codes.WRONG_SETTING)
  try:
    _check_written()
    yield
  except BrokenPipeError:  # of `| head`: nobody reads on
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  except Exception as error:
    sentence = None if logging.level_debug() else _sentence(error)
    if sentence is None:
      raise
    logging.flush()
    where = '' if 'pip install' in sentence else ' (--verbosity=1 shows where)'
    print(f'Error: {sentence}{where}', file=sys.stderr)
    sys.exit(exit_codes.WRONG_SETTING)


def _check_written() -> None:
  """Raises ValueError if a flag names a file that is there and that no command has written."""
  given = {name: flags.FLAGS[name].value for name in _REPLACED if name in flags.FLAGS}
  files = [(name, name, path) for name, path in given.items() if name != 'output_dir']
  if folder := given.get('output_dir'):
    of_report = {'html': 'index.html', 'json': 'results.json'}
    files += [('output_dir', kind, os.path.join(folder, x)) for kind, x in of_report.items()]
  for name, kind, path in files:
    if path and os.path.isfile(path) and not reporting.written_here(kind, path):
      raise ValueError(
        f'--{name}={given[name]}: {path} is there, and no command has written it: name another '
        'place'
      )


def _sentence(error: Exception) -> str | None:
  """What is wrong with a setting, or that it asks for too much memory; None for other errors."""
  if exit_codes.is_lost_connection(error):
    return None
  if isinstance(error, exit_codes.SETTING_ERRORS) or _UNBOUND.search(str(error)):
    return one_sentence(error)
  if isinstance(error, KeyError) and (scheme := _SCHEME.match(str(error))):  # of epath
    return f'no path can begin with {scheme[1]}: give a local one, or one of gs://'
  errors = getattr(sys.modules.get('tensorflow'), 'errors', None)  # which reads and writes gs://
  if errors and isinstance(error, errors.OpError) and '://' in error.message:
    return f'{one_sentence(error)}; give a local path, or one that can be reached'
  jax_errors = getattr(sys.modules.get('jax'), 'errors', None)
  of_devices = jax_errors and isinstance(error, jax_errors.JaxRuntimeError)
  out_of_memory = of_devices and _OUT_OF_MEMORY.match(str(error))
  if out_of_memory or isinstance(error, MemoryError):
    reason = _OUT_OF_MEMORY.sub('', str(error)).partition('\n')[0].strip(': .') or 'of the host'
    advice = 'take a smaller batch, fewer factors (num_factors) or a smaller model, or more devices'
    return f'not enough memory: {reason}; {advice}'
  return None


def help_text(documentation: str) -> str:
  """The text of --help: documentation of the command, exit codes, all flags of this project."""
  defined = flags.FLAGS.flags_by_module_dict()
  own_first = sorted(defined, key=lambda module: module.startswith(_SHARED))
  ours = [m for m in own_first if m == sys.argv[0] or m.split('.')[0] in _OURS]
  lines = [documentation]
  if 'Exit codes' not in lines[0]:
    lines.append('Exit codes: 0 done; 2 a setting is wrong.\n')
  for flag in [flag for module in ours for flag in defined[module]]:
    shown = (flag.default_as_str or '')[1:-1]
    default = '' if flag.default in (None, []) else f' (default: {shown})'
    text = ' '.join(flag.help.partition(';\n')[0].split()) + default  # absl explains lists there
    indent = ' ' * 4
    lines.append(f'  --{"[no]" * flag.boolean}{flag.name}')
    lines.append(textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent))
  return '\n'.join(lines)


def run_command(command: ModuleType) -> None:
  """Runs a module that is a command: its `run` takes its `Settings`, whose fields are the flags."""
  command.Settings.define_flags()
  screen.define_flags()
  if _HELP & set(sys.argv[1:]):
    with one_sentence_errors():
      print(help_text(command.__doc__ or ''), flush=True)
    sys.exit(0)
  if _unknown(sys.argv[1:]):  # JAX's, whose import takes half a second, or wrong
    import jax

    jax.config.parse_flags_with_absl()

  def shown(argv: Sequence[str]) -> None:
    screen.set_up()
    with distributed.leaving():
      call_command(command, argv)

  app.run(shown, flags_parser=parse_flags)


def call_command(command: ModuleType, argv: Sequence[str]) -> None:
  """Calls a command whose flags are parsed, and writes its report."""
  kind = command.Settings
  with one_sentence_errors(() if kind.takes_words else argv):
    given = kind.parsed(argv[1:])
    folder = None
    if isinstance(given, ReportFolder) and given.output_dir:
      folder = run_files.local_folder('output_dir', given.output_dir)
    report = command.run(given)
    if report is not None:
      places = {name: getattr(given, name, None) for name in ('json', 'png', 'html')}
      others = given.chosen(*report.writers)
      name = kind.__module__.rpartition('.')[2]
      report.write(f'het_plugin.{name}', output_dir=folder, others=others, **places)


def _unknown(arguments: Sequence[str]) -> bool:
  """Whether an argument is a flag that nothing has defined yet."""
  names = [x.lstrip('-').partition('=')[0] for x in arguments if x.startswith('-')]
  return any(not {x, x.removeprefix('no')} & set(flags.FLAGS) for x in names)


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses the flags, and returns the other arguments; a wrong one ends the program with code 2."""
  try:
    rest = flags.FLAGS(rewrite_flags(argv))
    for name in flags.FLAGS:
      flag = flags.FLAGS[name]
      if flag.present and isinstance(flag.value, float) and not math.isfinite(flag.value):
        raise flags.Error(f'--{name}={flag.value} must be a finite number')  # beyond bounds of absl
      if flag.present and name in _WRITTEN and os.path.isdir(str(flag.value)):
        raise flags.Error(f'--{name}={flag.value} is a folder: name a file, such as results.{name}')
      if name == 'output_dir' and os.path.isfile(str(flag.value)):
        raise flags.Error(f'--{name}={flag.value} is a file: name a folder')
    return rest
  except flags.Error as error:
    print(f'Error: {error} (--help shows the flags)', file=sys.stderr)
    sys.exit(exit_codes.WRONG_SETTING)
