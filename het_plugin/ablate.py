"""Runs an ablation: trains its cells with every seed and prints one table with standard errors.

    python -m het_plugin.ablate --list
    python -m het_plugin.ablate heads --output_dir=runs/ablations/heads --json=heads.json

An ablation is one of ours, by name, or a gin file of your own (docs/ablations.md). --gin.NAME=VALUE
goes to every run, after the cell's own settings; --gin.Ablation.NAME=VALUE to the ablation. Run the
command again to go on where it stopped: what is trained is not trained again.

In the output directory: results.json, results.txt, index.html with curves, and a folder a run with
its checkpoints, metrics.jsonl and config.gin. They are there after the first seed, and anew after
every other. Exit codes: 0 done; 2 a setting is wrong; 3 a run was not finite; 42 stopped by SIGTERM
with a checkpoint saved, to be started again.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

import gin
from het_plugin import reporting
from het_plugin.config import command_line, flag_values, parsing, registry
from het_plugin.experiments import runs as runs_lib
from het_plugin.experiments.outcome import Outcome, Request

FOLDER = 'het_plugin/gin/runs/ablations/'
STUDY = 'STUDY'  # the macro that a file binds


def define_flags() -> None:
  command_line.define_binding_flags()
  flags.DEFINE_bool('list', False, 'Prints the ablations that there are by name.')
  flags.DEFINE_string('output_dir', None, 'Takes the runs and results; else runs/ablations/NAME.')
  flags.DEFINE_list('seeds', None, "In place of the ablation's.")
  flags.DEFINE_multi_string('cell', None, 'Label of a cell to compare, repeatable; else all.')
  flags.DEFINE_string('json', None, 'Another place for results.json.')


def names() -> list[str]:
  """Of our ablations."""
  return sorted(path.stem for path in Path(parsing.resolve(FOLDER)).glob('*.gin'))


def gin_file(name: str) -> str:
  """The file of an ablation by its name, or the file that the name is.

  Raises:
    ValueError: neither.
  """
  if name in names():
    return f'{FOLDER}{name}.gin'
  if name.endswith('.gin'):
    return name
  raise ValueError(
    f'{name!r} is no ablation: choose from {", ".join(names())}, or name a file that ends in .gin'
  )


def study(name: str, bindings: Sequence[str] = (), search_paths: Sequence[str] = ('.',)):
  """What the ablation's file binds; its own bindings come after the file.

  Raises:
    ValueError: no such ablation, or a setting of it is wrong.
  """
  parsing.parse_config([gin_file(name)], bindings, search_paths)
  try:
    gin.query_parameter(f'%{STUDY}')
  except ValueError:
    raise ValueError(f'{name} binds no {STUDY}, such as {STUDY} = @Ablation()') from None
  return runs_lib.called(STUDY)


def split_bindings(bindings: Sequence[str]) -> tuple[list[str], list[str]]:
  """Those of studies, and those of runs."""
  own = [binding for binding in bindings if binding.startswith(('Ablation.', 'Flops.'))]
  return own, [binding for binding in bindings if binding not in own]


def listing() -> str:
  """A line for each of our ablations."""
  lines = [[name, study(name).title] for name in names()]
  return reporting.plain_table(reporting.Table('Ablations', ['name', 'what it compares'], lines))


def write(outcome: Outcome, output_dir: Path, copy: str | None) -> str:
  """Writes results.json, results.txt and index.html; returns the text."""
  results = {'title': outcome.title, **outcome.details, 'rows': outcome.rows}
  for path in [output_dir / 'results.json', *([copy] if copy else [])]:
    reporting.write_json(results, path)
  text = '\n\n'.join(
    [
      reporting.text_table(outcome.rows, row_title='cell'),
      *map(reporting.plain_table, outcome.tables),
    ]
  )
  (output_dir / 'results.txt').write_text(text + '\n')
  page = reporting.html_page(
    title=outcome.title,
    introduction=outcome.introduction,
    rows=outcome.rows,
    tables=outcome.tables,
    notes=outcome.notes,
    figures=outcome.figures,
    provenance=reporting.Provenance.of_this_process('het_plugin.ablate', outcome.configs),
    row_title='cell',
  )
  (output_dir / 'index.html').write_text(page)
  return text


def main(argv: Sequence[str]) -> None:
  registry.register_trainer()
  registry.register('experiments')
  with command_line.one_sentence_errors():
    if flags.FLAGS.list:
      print(listing())
      return
    if len(argv) != 2:
      raise app.UsageError(f'Name one ablation: {", ".join(names())}')
    own, of_runs = split_bindings(flags.FLAGS.gin_bindings)
    chosen = study(argv[1], own, flags.FLAGS.gin_search_paths)
    output_dir = Path(flags.FLAGS.output_dir or f'runs/ablations/{Path(argv[1]).stem}')
    seeds = flags.FLAGS.seeds
    request = Request(
      output_dir,
      of_runs,
      flags.FLAGS.gin_search_paths,
      None if seeds is None else flag_values.integers('seeds', seeds),
      flags.FLAGS.cell,
    )
    for outcome in chosen.run(request):
      text = write(outcome, output_dir, flags.FLAGS.json)
  print(f'\n{outcome.title}\n\n{text}\n\nThe same with curves: {output_dir / "index.html"}')


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
