"""Evaluates the predictive uncertainty of trained heads.

    python -m het_plugin.evaluate --checkpoint=runs/het_xl --checkpoint=runs/det \\
      --split=validation --ood_dataset=glyphs_heldout --ood_split=test --output_dir=runs/uncertainty

Prints a row per checkpoint: likelihood, calibration, selective prediction, and detection of inputs
from another data set. Differences are to the first checkpoint, paired by example. --checkpoint also
takes a file of predictions; --predictions adds further files. The configuration is the run's own
config.gin. Gin files and bindings override it, such as --gin.eval/Integrator.num_samples=1000.

--noise_test evaluates no head with noise. It estimates what such heads would gain over runs whose
head is Det, from representations of the split.

The output directory gets results.json, results.txt, index.html and its plots as .png files. With
--save_predictions it also gets predictions/NAME.npz.
"""

from collections.abc import Sequence

from absl import flags

from het_plugin import reporting
from het_plugin.cli import command_line
from het_plugin.evaluation import evaluate, noise_test, uncertainty_report
from het_plugin.evaluation.names import short_names
from het_plugin.runs import configuration
from het_plugin.system import distributed, flag_values, run_files
from het_plugin.weights import is_weights_file

_AS_GIVEN = (
  'checkpoint',
  'predictions',
  'dataset',
  'split',
  'ood_dataset',
  'ood_split',
  'max_examples',
  'batch_size',
  'covariance_images',
  'homoglyph_examples',
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
  flags.DEFINE_string('dataset', None, 'A task. Default: the task that the run was trained on.')
  flags.DEFINE_string(
    'split', None, 'A split of the task. Default: the split that the run was evaluated on.'
  )
  flags.DEFINE_string('ood_dataset', None, 'A task with unknown inputs.')
  flags.DEFINE_string('ood_split', None, 'Split of --ood_dataset.')
  flags.DEFINE_integer(
    'max_examples',
    None,
    'Largest number of examples per split, chosen at random.',
    lower_bound=1,
  )
  flags.DEFINE_integer('batch_size', 256, 'Global batch.', lower_bound=1)
  flags.DEFINE_bool('save_predictions', False, 'Writes OUTPUT_DIR/predictions/NAME.npz.')
  flags.DEFINE_integer(
    'covariance_images', 4, 'Number of images to draw class correlations of.', lower_bound=0
  )
  flags.DEFINE_list('covariance_index', [], 'Example ids to draw instead.')
  flags.DEFINE_integer(
    'homoglyph_examples', 512, 'Images for the homoglyph rate of glyph tasks.', lower_bound=0
  )
  flags.DEFINE_bool('noise_test', False, 'Estimates what noise would gain over DET instead.')
  flags.DEFINE_string('output_dir', None, 'Where the report goes.')
  flags.DEFINE_string('json', None, 'Another place for results.json.')


def noise_tests(settings: evaluate.EvaluateSettings) -> reporting.Report:
  """The report of --noise_test."""
  F = flags.FLAGS
  unused = (
    'predictions',
    'ood_dataset',
    'ood_split',
    'save_predictions',
    'covariance_images',
    'covariance_index',
    'homoglyph_examples',
  )
  command_line.check_unused(unused, '--noise_test')
  configs = [configuration(source, *command_line.gin_settings()) for source in F.checkpoint]
  for config in configs:
    noise_test.check_run(config.checkpoint.path, config.argument('model'))
  settings = evaluate.fitted(settings, configs)
  limits = {'batch_size': F.batch_size, 'max_examples': F.max_examples}
  found = {
    name: noise_test.of_run(config.open(), settings.dataset, settings.split, **limits)
    for name, config in zip(short_names(F.checkpoint), configs, strict=True)
  }
  return noise_test.make_report(found, f'{settings.dataset}, split {settings.split}')


def main(argv: Sequence[str]) -> None:
  F = flags.FLAGS
  with command_line.one_sentence_errors(argv):
    folder = run_files.local_folder('output_dir', F.output_dir) if F.output_dir else None
    if F.save_predictions and not folder:
      raise ValueError('--save_predictions needs --output_dir')
    index = F.covariance_index and flag_values.integers('covariance_index', F.covariance_index)
    settings = evaluate.EvaluateSettings(
      **{name: F[name].value for name in _AS_GIVEN},
      covariance_index=tuple(dict.fromkeys(index)),
      save_to=folder / 'predictions' if F.save_predictions else None,
    )
    if all(map(is_weights_file, F.checkpoint)):
      of_runs = 'gin_file', 'gin_bindings', 'batch_size', 'covariance_images', 'homoglyph_examples'
      command_line.check_unused(of_runs, 'files of predictions')
    distributed.initialize()
    if F.noise_test:
      report = noise_tests(settings)
      report.write('het_plugin.evaluate', json=F.json, output_dir=folder)
      return
    evaluations = evaluate.evaluate(settings, command_line.gin_settings())
    report = uncertainty_report.make_report(evaluations)
    report.write('het_plugin.evaluate', json=F.json, output_dir=folder)


if __name__ == '__main__':
  command_line.run(main)
