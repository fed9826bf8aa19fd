"""Evaluates the predictive uncertainty of trained heads.

    python -m het_plugin.evaluate --checkpoint=runs/het_xl --checkpoint=runs/det \\
      --split=validation --ood_dataset=glyphs_heldout --ood_split=test --output_dir=runs/uncertainty

Prints a row per checkpoint: likelihood, calibration, selective prediction, and how well its scores
tell the inputs of another data set from known ones; paired against the first checkpoint. A file of
predictions that were saved, here or elsewhere, may take the place of a checkpoint (or follow, as
--predictions). The configuration is the run's own config.gin; gin files and bindings override it,
such as --gin.eval/Integrator.num_samples=1000.

In the output directory: results.json, results.txt, index.html, its plots as .png files, and with
--save_predictions predictions/NAME.npz.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from het_plugin.config import command_line, distributed, flag_values
from het_plugin.evaluation import evaluate, uncertainty_report

_AS_GIVEN = (
  *('checkpoint', 'predictions', 'dataset', 'split', 'ood_dataset', 'ood_split', 'max_examples'),
  *('batch_size', 'covariance_images', 'homoglyph_examples'),
)


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  flags.DEFINE_multi_string(
    'checkpoint',
    [],
    "A run's directory (its newest checkpoint), one checkpoint, or a file of predictions (.npz, "
    '.safetensors); repeatable.',
  )
  flags.DEFINE_multi_string('predictions', [], 'A file of predictions; repeatable.')
  flags.DEFINE_string('dataset', None, 'A task; by default what the run trained on.')
  flags.DEFINE_string('split', None, 'Split of the task; by default what the run evaluated on.')
  flags.DEFINE_string('ood_dataset', None, 'A task of inputs to be told from known ones.')
  flags.DEFINE_string('ood_split', None, 'Split of --ood_dataset.')
  flags.DEFINE_integer(
    'max_examples', None, 'At most so many of each split, chosen at random.', lower_bound=1
  )
  flags.DEFINE_integer('batch_size', 256, 'Global batch.', lower_bound=1)
  flags.DEFINE_bool('save_predictions', False, 'Keeps log p in OUTPUT_DIR/predictions/NAME.npz.')
  flags.DEFINE_integer(
    'covariance_images', 4, 'Draws class correlations of the first images.', lower_bound=0
  )
  flags.DEFINE_list('covariance_index', [], 'Draws those of the examples of these ids instead.')
  flags.DEFINE_integer(
    'homoglyph_examples', 512, 'Images for the homoglyph rate of glyph tasks.', lower_bound=0
  )
  flags.DEFINE_string('output_dir', None, 'Where the report goes.')
  flags.DEFINE_string('json', None, 'Another place for results.json.')


def main(argv: Sequence[str]) -> None:
  F = flags.FLAGS
  with command_line.one_sentence_errors(argv):
    if F.save_predictions and not F.output_dir:
      raise ValueError('--save_predictions needs --output_dir')
    index = F.covariance_index and flag_values.integers('covariance_index', F.covariance_index)
    settings = evaluate.Settings(
      **{name: F[name].value for name in _AS_GIVEN},
      covariance_index=tuple(dict.fromkeys(index)),
      save_to=Path(F.output_dir) / 'predictions' if F.save_predictions else None,
    )
    distributed.initialize()
    evaluations = evaluate.evaluate(settings, command_line.gin_settings())
    report = uncertainty_report.make_report(evaluations)
    report.write('het_plugin.evaluate', json=F.json, output_dir=F.output_dir)


if __name__ == '__main__':
  command_line.run(main)
