"""Finds wrong labels of saved representations.

    python -m het_plugin.audit --train=train.npz --csv=audit.csv --json=audit.json
    python -m het_plugin.audit --train=train.npz --suggest=corrected.npz
    python -m het_plugin.audit --checkpoint=runs/det --dataset=digits --html=audit.html
    python -m het_plugin.audit --train=train.npz --dataset=digits --html=audit.html

Fits a head to each fold's other folds, and compares the labels with its location: what it says of
the classes without the noise. Then it fits the head to what it found, in --rounds rounds or fewer.
Prints the share of wrong labels, the pairs of classes that people confuse, and the labels that are
most probably wrong. --csv and --json list every example: index, label, probability of the label,
probability that it is wrong, suggested label, and its kind: wrong, ambiguous or fine. --suggest
writes the rows with suggested labels in place of wrong ones. Of several labels of an example, which
are votes, the most frequent one is audited. With --dataset the page of --html
shows images of the worst labels, of the most ambiguous ones and of the confused pairs. The index of
a row is then the number of its example in --split.
--C, --C_noise and --num_factors may list several values, from which held-out labels choose; with
--C_noise=auto every fit chooses from no noise and shares of C.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from het_plugin.cli import command_line
from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators.audit import ROUNDS
from het_plugin.estimators.probe import Settings
from het_plugin.evaluation import audit
from het_plugin.rows import files
from het_plugin.system import distributed, flag_values, stopping
from het_plugin.weights import is_weights_file

# Flags of the fits that --pred_probs replaces.
_OF_FITS = ('head', 'C', 'C_noise', 'num_factors', 'rounds', 'folds', 'max_iter', 'seed')


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  flags.DEFINE_string('train', None, 'Rows: F.npz[:SPLIT], F.safetensors or X.npy,Y.npy; or a run.')
  flags.DEFINE_string('checkpoint', None, 'Instead of a file: a run or a published file.')
  flags.DEFINE_string('dataset', None, 'The task to represent, or of the rows of --train.')
  flags.DEFINE_string('split', 'train', 'Split of --dataset.')
  flags.DEFINE_string('layer', 'pre_logits', 'With --checkpoint: the layer to represent.')
  flags.DEFINE_string(
    'output_dir', 'representations', 'With --checkpoint: where to write its file.'
  )
  flags.DEFINE_enum('head', 'det', list(CLASSIFIERS), 'The head to fit.')
  flags.DEFINE_list('C', ['1'], 'Inverse strength of the regularisation, as in scikit-learn.')
  flags.DEFINE_list(
    'C_noise', ['0.1'], 'Inverse strength of the regularisation of the noise, or auto.'
  )
  flags.DEFINE_list('num_factors', ['4'], 'R.')
  flags.DEFINE_integer(
    'rounds',
    ROUNDS,
    'Largest number of rounds. From the second one on, the head is fitted to what was found.',
    lower_bound=1,
  )
  flags.DEFINE_integer('folds', 5, 'Folds of the rows.', lower_bound=2)
  flags.DEFINE_integer('max_iter', 500, 'Largest number of iterations of a fit.', lower_bound=1)
  flags.DEFINE_integer('seed', 0, 'Seed of the folds and of the initial values.', lower_bound=0)
  flags.DEFINE_string('csv', None, 'Where to write a line per example.')
  flags.DEFINE_string(
    'suggest',
    None,
    'Where to write the rows with suggested labels; with --dataset=image_folder:PATH also '
    'PATH/labels.csv, which a training of PATH reads.',
  )
  flags.DEFINE_string(
    'pred_probs', None, 'A .npy file of out-of-fold probabilities [N, K], instead of fits.'
  )
  flags.DEFINE_string(
    'write_pred_probs', None, 'Where to write the out-of-fold probabilities [N, K], as .npy.'
  )
  flags.DEFINE_string('json', None, 'Where to write all results.')
  flags.DEFINE_string('html', None, 'Where to write a page.')


def main(argv: Sequence[str]) -> None:
  F = flags.FLAGS
  with command_line.one_sentence_errors(argv):
    settings = Settings(
      heads=[F.head],
      c=[flag_values.positive_or_word('C', value, ()) for value in F.C],
      c_noise=[flag_values.positive_or_word('C_noise', value, ('auto',)) for value in F.C_noise],
      num_factors=flag_values.integers('num_factors', F.num_factors, 1),
      folds=F.folds,
      max_iter=F.max_iter,
      seed=F.seed,
    )
    command_line.check_rows_flags(['train'], ['layer', 'output_dir'])
    if F['split'].present and not F.dataset:
      raise ValueError('--split is for --dataset: a split of a file is --train=F.npz:SPLIT')
    if F.head == 'det' and (F['C_noise'].present or F['num_factors'].present):
      raise ValueError(
        '--C_noise and --num_factors have no effect on --head=det, which has no noise'
      )
    if F.suggest and not F.suggest.endswith('.csv') and not is_weights_file(F.suggest):
      raise ValueError(f'--suggest={F.suggest} must end in .npz, .safetensors or .csv')
    if F.pred_probs:
      command_line.check_unused(
        (*_OF_FITS, 'write_pred_probs'), '--pred_probs, which is not fitted'
      )
    if F.write_pred_probs and not F.write_pred_probs.endswith('.npy'):
      raise ValueError(f'--write_pred_probs={F.write_pred_probs} must end in .npy')
    if F.train:
      _check_suggested(F.suggest, F.train)
    examples = None
    source = F.train
    if F.dataset:
      from het_plugin.evaluation.examples import Examples  # imports what files do not need

      examples = Examples.of(F.dataset, F.split)
    if (F.suggest or '').endswith('.csv') and not (examples and examples.have_files):
      raise ValueError(
        f'--suggest={F.suggest} needs --dataset=image_folder:PATH, whose files it names'
      )
    if F.checkpoint:
      from het_plugin.evaluation import represent

      of_run = F.checkpoint, command_line.gin_settings(), F.dataset, F.output_dir
      (source,) = represent.files_of('het_plugin.audit', *of_run, [F.split], F.layer)
      _check_suggested(F.suggest, source)
    from het_plugin.runs import sources

    source = sources.rows_or_file(source, F.split)
    probs = F.write_pred_probs, F.pred_probs
    report = audit.report(source, settings, examples, F.rounds, *probs)
    report.write('het_plugin.audit', json=F.json, html=F.html)
    if F.csv:
      audit.write_csv(F.csv, report.json['rows'])
    if F.suggest:
      audit.write_suggested(F.suggest, report.json['rows'])
      num_wrong = report.json['counts']['wrong']
      print(f'\n{F.suggest}: {num_wrong:,} of {len(report.json["rows"]):,} labels are suggestions.')


def _check_suggested(path: str | None, source: str) -> None:
  """Raises ValueError if a file that is read would be replaced."""
  read = files.partition_source(source)[0].split(',')
  if path and Path(path).resolve() in (Path(x).resolve() for x in read):
    raise ValueError(f'--suggest={path} is read by the audit: name another file')


if __name__ == '__main__':
  stopping.install()
  command_line.run(main)
