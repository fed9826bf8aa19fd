"""Fits and compares heads on saved representations, to the optimum; no backbone is trained.

    python -m het_plugin.probe --train=train.npz --test=test.npz --heads=det,het_xl
    python -m het_plugin.probe --train=representations/digits  # of `represent`: train and test
    python -m het_plugin.probe --train=X.npy,Y.npy --heads=det,het,het_xl --C=0.1,1,10 --folds=5
    python -m het_plugin.probe --checkpoint=runs/det --dataset=digits

Prints NLL, precision@1, ECE and Brier score with standard errors, and differences to the first head
(or --baseline), paired by example. Without --test the rows of --train are scored fold by fold.
--C, --C_noise, --num_factors and --tau may list several values: those with the least NLL on a share
(--validation) of the training rows are taken, and of several --C_noise and 0 (no noise) the
smallest whose NLL is within a standard error of the least."""

from collections.abc import Sequence

from absl import flags

from het_plugin.config import command_line, distributed, flag_values
from het_plugin.estimators import probe
from het_plugin.operations import stopping


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  files = 'F.npz, F.safetensors or X.npy,Y.npy; F.npz:SPLIT if it has several.'
  flags.DEFINE_string('train', None, f'Representations that the heads are fitted to: {files}')
  flags.DEFINE_string('test', None, f'Representations that they are scored on: {files}')
  flags.DEFINE_string('ood', None, f'Rows of another distribution, for the AUROC: {files}')
  flags.DEFINE_enum('target', 'auto', ['auto', 'votes'], 'Whether several labels are votes.')
  flags.DEFINE_list('mesh', [], 'DATA,MODEL devices that rows and classes are cut over.')
  flags.DEFINE_string('checkpoint', None, 'Instead of files: a run or a published file.')
  flags.DEFINE_string('dataset', None, 'With --checkpoint: a task, represented first.')
  flags.DEFINE_list('splits', ['train', 'test'], 'Splits of --dataset to fit to and to score on.')
  flags.DEFINE_string('layer', 'pre_logits', 'With --checkpoint: the representation.')
  flags.DEFINE_string('output_dir', 'representations', 'With --checkpoint: where its files lie.')
  flags.DEFINE_list('heads', ['det', 'het_xl'], f'Of {", ".join(probe.CLASSIFIERS)}.')
  flags.DEFINE_string('baseline', None, 'The head to compare with; the first by default.')
  flags.DEFINE_list('C', ['1'], 'Inverse strength of the regularisation, as in scikit-learn.')
  flags.DEFINE_list('C_noise', [], 'The same for the noise; 0.03 of C by default.')
  flags.DEFINE_list('num_factors', ['8'], 'R, of heads with noise.')
  flags.DEFINE_list('tau', ['1'], 'Temperatures: numbers, learned or validation.')
  flags.DEFINE_list('hidden_layers', [], 'Widths of layers below the heads; none by default.')
  flags.DEFINE_integer('folds', 5, 'Folds of the training rows, without --test.', lower_bound=2)
  flags.DEFINE_float('validation', 0.1, 'Share of the training rows that chooses from a grid.')
  flags.DEFINE_integer('num_samples', 64, 'S, points of a softmax with noise.', lower_bound=1)
  flags.DEFINE_float('tol', 1e-4, 'Gradient at which a fit ends.')
  flags.DEFINE_integer('max_iter', 500, 'Iterations at which it ends anyway.', lower_bound=1)
  flags.DEFINE_integer('seed', 0, 'Seed of folds and starts.', lower_bound=0)
  flags.DEFINE_string('json', None, 'Where the rows are written.')
  flags.DEFINE_string('html', None, 'Where they are written as a page with plots.')


def settings() -> probe.Settings:
  F = flags.FLAGS
  same = 'heads baseline folds validation num_samples tol max_iter seed target'.split()
  return probe.Settings(
    c=[flag_values.positive_or_word('C', value, ()) for value in F.C],
    c_noise=[flag_values.positive_or_word('C_noise', value, ()) for value in F.C_noise] or [None],
    num_factors=flag_values.integers('num_factors', F.num_factors, 1),
    hidden_layers=F.hidden_layers and flag_values.integers('hidden_layers', F.hidden_layers, 1),
    mesh=flag_values.integers('mesh', F.mesh, 1, (2,)) if F.mesh else None,
    tau=[flag_values.positive_or_word('tau', value, ('learned', 'validation')) for value in F.tau],
    **{name: F[name].value for name in same},
  )


def represented() -> list[str]:
  """The files of the splits of --dataset."""
  from het_plugin.evaluation import represent  # imports TensorFlow, which files do not need

  F = flags.FLAGS
  source = F.checkpoint, command_line.gin_settings(), F.dataset
  where = {'splits': ','.join(F.splits), 'layers': [F.layer]}
  return [row['file'] for row in represent.represent(*source, F.output_dir, **where)['files']]


def main(argv: Sequence[str]) -> None:
  F = flags.FLAGS
  with command_line.one_sentence_errors(argv):
    chosen, (train, *test) = settings(), [F.train, F.test]
    if (train is None) == (F.checkpoint is None or F.dataset is None):
      raise ValueError('--train is needed, or --checkpoint and --dataset')
    if F.checkpoint:
      train, *test = represented()
    report = probe.probe(train, test[0] if test else None, chosen, F.ood)
    report.write('het_plugin.probe', json=F.json, html=F.html)


if __name__ == '__main__':
  stopping.install()
  command_line.run(main)
