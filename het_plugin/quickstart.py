"""Trains every head for the same steps on rendered characters and lays the results side by side.

    python -m het_plugin.quickstart --output_dir=runs/quickstart

A head whose run is complete is not trained again; one that was interrupted goes on. In the output
directory: results.json (one row a head), results.txt, curves.png, index.html, and a run directory a
head with its checkpoints, metrics.jsonl, event files and config.gin.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

import gin
from het_plugin import reporting
from het_plugin.config import command_line, registry
from het_plugin.experiments import runs as runs_lib
from het_plugin.training import partitioning, run_files

HEADS = {
  'det': 'DET',
  'det_learned_tau': 'DET, learned tau',
  'het': 'HET',
  'het_h': 'HET-H',
  'het_xl': 'HET-XL',
}
RUN = 'het_plugin/gin/runs/glyphs_quickstart.gin'


def define_flags() -> None:
  command_line.define_flags()
  flags.DEFINE_string('run', RUN, 'The gin file that all heads share.')
  flags.DEFINE_list('heads', list(HEADS), f'Some of {",".join(HEADS)}.')
  flags.DEFINE_string('output_dir', 'runs/quickstart', 'Where everything goes.')
  flags.DEFINE_string('json', None, 'Another place for results.json.')


def head_run(head: str, bindings: Sequence[str]) -> runs_lib.Run:
  files = [flags.FLAGS.run, f'het_plugin/gin/heads/{head}.gin', *flags.FLAGS.gin_file]
  return runs_lib.Run(files, bindings, flags.FLAGS.gin_search_paths)


def result(head: str, run_dir: Path) -> dict[str, Any]:
  """The row of a finished run, read back from what it wrote; the counts from the configured model
  itself.
  """
  metrics = run_files.read_jsonl(run_dir / 'metrics.jsonl')
  task = gin.query_parameter('%MIXTURE_OR_TASK_NAME')
  final = runs_lib.final_evaluations(metrics)[f'training_eval/{task}']
  model, counts = runs_lib.configured_model()
  partitioner = gin.get_configurable(partitioning.PjitPartitioner)()
  by_dataset, errors = few_shot_accuracies(
    run_files.read_jsonl(run_dir / 'fewshot.jsonl'), final['step']
  )
  return {
    'head': HEADS[head],
    'num_classes': model.head.num_classes,
    'pre_logits_dim': model.backbone.pre_logits_dim,
    'num_factors': getattr(model.head, 'num_factors', None),
    'mesh': f'{partitioner.data_shards}x{partitioner.model_shards}',
    'nll': final['nll'],
    'precision_at_1': final['precision_at_1'],
    'ece': final['ece'],
    'tau': final['tau'],
    'num_params': counts.total,
    'extra_params': counts.extra,
    'ms_per_step': runs_lib.ms_per_step(metrics),
    'fewshot': average_over_datasets(by_dataset),
    'fewshot_by_dataset': by_dataset,
    'fewshot_stderr_by_dataset': errors,
    'steps': final['step'],
  }


def few_shot_accuracies(lines: Sequence[Mapping[str, Any]], step: int) -> tuple[dict, dict]:
  """{data set: {shots: mean accuracy}} and the same with standard errors, of one step."""
  means, errors = {}, {}
  for line in lines:
    if line['step'] == step:
      means.setdefault(line['dataset'], {})[line['shots']] = line['mean']
      errors.setdefault(line['dataset'], {})[line['shots']] = line['stderr']
  return means, errors


def average_over_datasets(by_dataset: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
  """Accuracy by shots averaged over the data sets, the aggregate of table 22."""
  shots = {n for accuracies in by_dataset.values() for n in accuracies}
  return {n: statistics.fmean(a[n] for a in by_dataset.values() if n in a) for n in sorted(shots)}


def references(num_classes: int, image_size: int) -> list[dict[str, Any]]:
  """Rows to read the others by: guessing, and what identical glyphs leave to the best
  classifier.
  """
  from het_plugin.data.glyph_bank import homoglyph_ceiling

  return [
    {'head': 'chance', 'nll': math.log(num_classes), 'precision_at_1': 1 / num_classes},
    {'head': 'ceiling (identical glyphs)', 'precision_at_1': homoglyph_ceiling(size=image_size)},
  ]


def report(
  rows: Sequence[Mapping[str, Any]], runs: Mapping[str, Path], output_dir: Path, yardsticks
) -> str:
  """Writes results.json, results.txt, curves.png and index.html; returns the table."""
  reporting.write_json(rows, output_dir / 'results.json')
  shown = [
    {k: v for k, v in row.items() if not k.startswith('fewshot') and k != 'steps'}
    | {'fewshot': row['fewshot_by_dataset'], 'fewshot_stderr': row['fewshot_stderr_by_dataset']}
    for row in rows
  ]
  table = reporting.text_table(shown, yardsticks)
  (output_dir / 'results.txt').write_text(table + '\n')
  lines = {
    HEADS[head]: runs_lib.curves(run_files.read_jsonl(run / 'metrics.jsonl'))
    for head, run in runs.items()
  }
  png = reporting.curves_png(lines)
  (output_dir / 'curves.png').write_bytes(png)
  page = reporting.html_page(
    title='Heteroscedastic heads on rendered characters',
    introduction=f'Every head trained for the same {rows[0]["steps"]:,} steps on the same '
    'examples, then evaluated on unseen renderings.',
    rows=shown,
    references=yardsticks,
    notes=[
      'NLL: negative log-likelihood of the validation split in nats; prec@1: share of examples '
      'whose most probable class is right; ECE: expected calibration error over 15 bins.',
      'extra: parameters beyond the deterministic head. Parameters are counted without the '
      'padding of the classes.',
      'ms/step: median over the run, on the machine that made this page.',
      'few-shot: ridge regression on the frozen pre-logits; glyphs_heldout has characters and '
      'typefaces that training did not show. Mean and standard error over draws of the shots.',
      'Chance guesses uniformly. The ceiling is the best precision@1 that identical glyphs of '
      'different characters leave.',
    ],
    figures=[
      reporting.Figure(
        png,
        'Training loss and temperature.',
        'Training loss and temperature tau of every head by step.',
      )
    ],
    provenance=reporting.Provenance.of_this_process(
      'het_plugin.quickstart',
      {HEADS[h]: (run / 'config.gin').read_text() for h, run in runs.items()},
    ),
  )
  (output_dir / 'index.html').write_text(page)
  return table


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  registry.register_trainer()
  with command_line.one_sentence_errors():
    if unknown := [head for head in flags.FLAGS.heads if head not in HEADS]:
      raise ValueError(f'--heads={",".join(unknown)} is unknown: choose from {", ".join(HEADS)}')
    output_dir = Path(flags.FLAGS.output_dir)
    rows, runs = [], {}
    for number, head in enumerate(flags.FLAGS.heads, 1):
      logging.info('=== %s (%d of %d)', HEADS[head], number, len(flags.FLAGS.heads))
      runs[head] = output_dir / head
      runs_lib.complete(head_run(head, flags.FLAGS.gin_bindings), runs[head])
      rows.append(result(head, runs[head]))
    yardsticks = references(
      rows[0]['num_classes'], gin.query_parameter('%TASK_FEATURE_LENGTHS')['image']
    )
    table = report(rows, runs, output_dir, yardsticks)
    if flags.FLAGS.json:
      reporting.write_json(rows, flags.FLAGS.json)
  print(f'\n{table}\n\nThe same with curves: {output_dir / "index.html"}')


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
