"""Writes a comparison of heads: results.json, results.txt, curves.png and index.html."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from het_plugin import reporting
from het_plugin.experiments import head_comparison
from het_plugin.experiments import runs as runs_lib
from het_plugin.training import run_files

_NUM_PICTURES = 8
_NOTES = (
  'NLL: negative log-likelihood of the validation split in nats; prec@1: share of examples whose '
  'most probable class is right; ECE: expected calibration error over 15 bins.',
  'extra: parameters beyond the deterministic head. Parameters are counted without the padding of '
  'the classes.',
  'ms/step: median of turns that alternate between the heads, on the machine that made this page; '
  'for a head that an earlier start had trained, the median over its run.',
  'few-shot: ridge regression on the frozen pre-logits; glyphs_heldout has characters and '
  'typefaces that training did not show. Mean and standard error over draws of the shots.',
  'Chance guesses uniformly. The ceiling is the best precision@1 that identical glyphs of '
  'different characters leave.',
  'Each row is one run with one seed: `python -m het_plugin.ablate heads` compares with several.',
)


def write(
  rows: Sequence[Mapping[str, Any]],
  runs: Mapping[str, Path],
  output_dir: Path,
  yardsticks: Sequence[Mapping[str, Any]],
) -> str:
  """Writes the files; returns the table and the sentences below it.

  Args:
    rows: rows of `head_comparison.row`.
    runs: {head: folder of its run}.
    output_dir: folder of the files.
    yardsticks: rows of `head_comparison.references`.
  """
  reporting.write_json(rows, output_dir / 'results.json')
  shown = [
    {k: v for k, v in row.items() if not k.startswith('fewshot') and k != 'steps'}
    | {'fewshot': row['fewshot_by_dataset'], 'fewshot_stderr': row['fewshot_stderr_by_dataset']}
    for row in rows
  ]
  summary = head_comparison.sentences(rows)
  text = '\n\n'.join([reporting.text_table(shown, yardsticks), '\n'.join(summary)])
  (output_dir / 'results.txt').write_text(text + '\n')
  titles = {head_comparison.HEADS[head]: run for head, run in runs.items()}
  curves = {
    title: runs_lib.curves(run_files.read_lines(run / 'metrics.jsonl'))
    for title, run in titles.items()
  }
  (output_dir / 'curves.png').write_bytes(reporting.curves_png(curves))
  page = reporting.html_page(
    title='Heteroscedastic heads on rendered characters',
    introduction=f'Every head trained for the same {rows[0]["steps"]:,} steps on the same '
    f'examples, then evaluated on unseen renderings. {" ".join(summary)}',
    rows=shown,
    references=yardsticks,
    notes=_NOTES,
    figures=[
      reporting.Figure(
        reporting.curve_pngs(curves),
        'Training loss and temperature.',
        'Training loss and temperature tau of every head by step.',
      ),
      reporting.Figure(
        _examples(titles),
        'Unseen renderings, from the one of which the first head is surest (left) to the most '
        'doubtful, and the most probable character by each head with its probability. Green is '
        'right. Where different characters look alike, no head can be sure.',
        'Examples with the prediction of each head.',
        recolour=False,
      ),
    ],
    provenance=reporting.Provenance.of_this_process(
      'het_plugin.quickstart',
      {title: (run / 'config.gin').read_text() for title, run in titles.items()},
    ),
  )
  (output_dir / 'index.html').write_text(page)
  return text


def _examples(titles: Mapping[str, Path]) -> bytes:
  """The picture of some examples, evenly spaced by the first head's probability of its answer."""
  from het_plugin.data.glyph_bank import glyph_classes

  characters = [chr(c) for c in glyph_classes('core').code_points]
  found = {title: np.load(run / head_comparison.EXAMPLES_FILE) for title, run in titles.items()}
  first = next(iter(found.values()))
  order = np.argsort(-first['probability'], kind='stable')
  picked = order[np.linspace(0, len(order) - 1, _NUM_PICTURES).astype(int)]
  predictions = {
    title: [
      (characters[of['top'][i]], float(of['probability'][i]), of['top'][i] == of['label'][i])
      for i in picked
    ]
    for title, of in found.items()
  }
  return reporting.examples_png(
    first['image'][picked], [characters[first['label'][i]] for i in picked], predictions
  )
