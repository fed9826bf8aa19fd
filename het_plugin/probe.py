"""Fits heads to saved representations, up to convergence, and compares them; trains no backbone.

    python -m het_plugin.probe --train=train.npz --test=test.npz --heads=det,het_xl
    python -m het_plugin.probe --train=representations/digits  # from `represent`: train and test
    python -m het_plugin.probe --train=X.npy,Y.npy --heads=det,het,het_xl --C=0.1,1,10 --folds=5
    python -m het_plugin.probe --checkpoint=runs/det --dataset=digits
    python -m het_plugin.probe --train=train.npz --noise_test  # what heads would gain

Prints NLL, precision@1, ECE and Brier score with standard errors, and differences to the first head
(or --baseline), paired by example. Without --test the rows of --train are scored fold by fold.
--C, --C_noise, --num_factors and --tau may list several values. The NLL on a share (--validation)
of the training rows chooses. For --C_noise, 0 (no noise) is added, and the smallest value within
one standard error of the best is taken. With --C_noise=auto, the default, there is no such grid:
every fit chooses no noise or a share of C by the same rule, on a fifth of its own rows. A list has
a whole fit for each value; auto has short ones, each from the end of the one before.

--noise_test fits no head. It estimates what noise, and what a hidden layer, would gain over DET.
"""

from collections.abc import Sequence

from absl import flags

from het_plugin import reporting
from het_plugin.cli import command_line
from het_plugin.estimators import CLASSIFIERS
from het_plugin.estimators.probe import Settings
from het_plugin.evaluation import noise_test, probe
from het_plugin.system import distributed, flag_values, stopping


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  files = 'F.npz, F.safetensors or X.npy,Y.npy; F.npz:SPLIT if it has several; a run, or a task.'
  flags.DEFINE_string('train', None, f'Representations to fit the heads to: {files}')
  flags.DEFINE_string('test', None, f'Representations to score the heads on: {files}')
  flags.DEFINE_string('ood', None, f'Rows of another distribution, for the AUROC: {files}')
  flags.DEFINE_enum('target', 'auto', ['auto', 'votes'], 'votes: the labels of a row are votes.')
  flags.DEFINE_list('mesh', [], 'DATA,MODEL: devices that split rows and classes.')
  flags.DEFINE_string('checkpoint', None, 'Instead of files: a run or a published file.')
  flags.DEFINE_string('dataset', None, 'With --checkpoint: the task to represent.')
  flags.DEFINE_list(
    'splits',
    None,
    'Splits of --dataset to fit to and to score on. Default: train, and test or else validation.',
  )
  flags.DEFINE_string('layer', 'pre_logits', 'With --checkpoint: the layer to represent.')
  flags.DEFINE_string(
    'output_dir', 'representations', 'With --checkpoint: where to write its files.'
  )
  flags.DEFINE_list('heads', ['det', 'het_xl'], f'Heads to fit: {", ".join(CLASSIFIERS)}.')
  flags.DEFINE_string('baseline', None, 'The head to compare with. Default: the first.')
  flags.DEFINE_list('C', ['1'], 'Inverse strength of the regularisation, as in scikit-learn.')
  flags.DEFINE_list(
    'C_noise',
    ['auto'],
    'Inverse strength of the regularisation of the noise; auto: every fit chooses it.',
  )
  flags.DEFINE_list('num_factors', ['8'], 'R, for heads with noise.')
  flags.DEFINE_list('tau', ['1'], 'Temperatures: numbers, learned or validation.')
  flags.DEFINE_list('hidden_layers', [], 'Widths of layers below the heads. Default: none.')
  flags.DEFINE_integer('folds', 5, 'Folds of the training rows, without --test.', lower_bound=2)
  flags.DEFINE_float('validation', 0.1, 'Share of the training rows that chooses from a grid.')
  flags.DEFINE_integer('num_samples', 64, 'S, for a softmax with noise.', lower_bound=1)
  flags.DEFINE_float('tol', 1e-4, 'A fit ends when its gradient is this small.')
  flags.DEFINE_integer('max_iter', 500, 'Largest number of iterations.', lower_bound=1)
  flags.DEFINE_integer('seed', 0, 'Seed of the folds and of the initial values.', lower_bound=0)
  flags.DEFINE_bool('noise_test', False, 'Estimates gains instead of fitting heads with noise.')
  flags.DEFINE_string('json', None, 'Where to write the rows.')
  flags.DEFINE_string('html', None, 'Where to write a page with plots.')


def settings() -> Settings:
  F = flags.FLAGS
  same = 'heads baseline folds validation num_samples tol max_iter seed target'.split()
  return Settings(
    c=[flag_values.positive_or_word('C', value, ()) for value in F.C],
    c_noise=[flag_values.positive_or_word('C_noise', value, ('auto',)) for value in F.C_noise],
    num_factors=flag_values.integers('num_factors', F.num_factors, 1),
    hidden_layers=F.hidden_layers and flag_values.integers('hidden_layers', F.hidden_layers, 1),
    mesh=flag_values.integers('mesh', F.mesh, 1, (2,)) if F.mesh else None,
    tau=[flag_values.positive_or_word('tau', value, ('learned', 'validation')) for value in F.tau],
    **{name: F[name].value for name in same},
  )


def tested(train: probe.FileOrArrays, chosen: Settings) -> reporting.Report:
  """The report of --noise_test."""
  F = flags.FLAGS
  unused = 'test ood baseline C_noise tau hidden_layers validation num_samples mesh'.split()
  command_line.check_unused(unused, '--noise_test')
  for name in ('C', 'num_factors'):
    if len(F[name].value) > 1:
      raise ValueError(f'--{name}={",".join(F[name].value)}: --noise_test takes one value')
  settings = {name: getattr(chosen, name) for name in ('folds', 'tol', 'max_iter', 'seed')}
  if F['heads'].present:
    settings['heads'] = [name for name in chosen.heads if name != 'det']
  return noise_test.of_rows(
    train, chosen.target, C=chosen.c[0], num_factors=chosen.num_factors[0], **settings
  )


def main(argv: Sequence[str]) -> None:
  F = flags.FLAGS
  with command_line.one_sentence_errors(argv):
    chosen = settings()
    train, *test = [F.train, F.test]
    of_checkpoint = ['dataset', 'splits', 'layer', 'output_dir']
    command_line.check_rows_flags(['train', 'test'], of_checkpoint)
    if not F.noise_test and set(chosen.heads) <= {'det'}:
      unused = 'C_noise', 'num_factors', 'num_samples'
      command_line.check_unused(unused, '--heads=det, which has no noise')
    if not F.noise_test and F.test:
      command_line.check_unused(['folds'], '--test')
    if len(F.splits or ()) > 2:
      raise ValueError(f'--splits={",".join(F.splits)} must be a training and a test split')
    if F.checkpoint:
      from het_plugin.evaluation import represent  # imports TensorFlow, which files do not need
      from het_plugin.runs.run import default_split

      of_run = F.checkpoint, command_line.gin_settings(), F.dataset, F.output_dir
      if F.noise_test:
        splits = (F.splits or ['train'])[:1]
      else:
        splits = F.splits or ['train', default_split(represent.task_name(F.dataset))]
      train, *test = represent.files_of('het_plugin.probe', *of_run, splits, F.layer)
    from het_plugin.runs import sources  # imports what --help does not need

    train = sources.rows_or_file(train, 'train')
    test = test and test[0] and sources.rows_or_file(test[0])
    if F.noise_test:
      report = tested(train, chosen)
    else:
      report = probe.probe(train, test or None, chosen, F.ood and sources.rows_or_file(F.ood))
    report.write('het_plugin.probe', json=F.json, html=F.html)


if __name__ == '__main__':
  stopping.install()
  command_line.run(main)
