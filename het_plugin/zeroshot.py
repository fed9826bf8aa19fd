"""Evaluates contrastive checkpoints by zero-shot classification and retrieval.

    python -m het_plugin.zeroshot --checkpoint=runs/lit_het_xl --dataset=glyphs_heldout
    python -m het_plugin.zeroshot --gin_file=gin/evaluation/zeroshot_paper.gin \\
      --group=DET=runs/det_0,runs/det_1,runs/det_2 --group=HET-XL=runs/xl_0,runs/xl_1,runs/xl_2

    python -m het_plugin.zeroshot --checkpoint=clip.safetensors --dataset=image_folder:/data/birds

Prints top-1 and top-5 accuracy on data sets with class names, and recall at 1, 5 and 10 in both
directions on data sets with captions. --checkpoint may be repeated. A --group is a name and the
checkpoints of several seeds. For groups, means and standard errors are printed, and the p-value of
each group against the first (table 6 of Collier et al. 2023).
"""

from collections.abc import Sequence

from absl import flags

from het_plugin.cli import command_line
from het_plugin.evaluation import zeroshot_report
from het_plugin.runs.run import TEST_SPLITS
from het_plugin.system import distributed

_OF_DATASETS = (
  'split',
  'templates',
  'class_names',
  'lower',
  'max_examples',
  'resize',
  'identical_captions_right',
)  # flags that replace a data set's own settings


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  flags.DEFINE_multi_string(
    'checkpoint', [], "A run's directory, or a checkpoint in it; repeatable."
  )
  flags.DEFINE_multi_string('group', [], 'NAME=DIR,DIR,...: runs of several seeds; repeatable.')
  flags.DEFINE_list('names', None, 'Names of the --checkpoint runs. Default: from their paths.')
  flags.DEFINE_list(
    'dataset',
    None,
    'Data sets that gin files bind to ZeroShotAction.datasets, by name; tasks; or NAME=TASK. '
    'Default: all that are bound, else glyphs_heldout and glyphs_core.',
  )
  splits = ' or '.join(TEST_SPLITS)
  flags.DEFINE_string('split', None, f'A split or a slice of one. Default for a task: {splits}.')
  flags.DEFINE_string('templates', None, "none, photo, ensemble, a text with '{}', or a file.")
  flags.DEFINE_string('class_names', None, "A file with a name per line, in the labels' order.")
  flags.DEFINE_bool('lower', None, 'Whether class names are lower-cased.')
  flags.DEFINE_bool(
    'identical_captions_right', None, 'Whether a caption is right for every image with this text.'
  )
  flags.DEFINE_integer(
    'max_examples', None, 'Largest number of examples, a fixed random choice.', lower_bound=1
  )
  flags.DEFINE_enum('resize', None, ['aspect', 'squash'], 'How photographs are made square.')
  flags.DEFINE_integer(
    'samples',
    0,
    'Ranks classes by their probability under this number of noise samples.',
    lower_bound=0,
  )
  flags.DEFINE_integer('batch_size', 256, 'Global batch of images and of texts.', lower_bound=1)
  flags.DEFINE_string('json', None, 'Where to write all results.')


def main(argv: Sequence[str]) -> None:
  F = flags.FLAGS
  with command_line.one_sentence_errors(argv):
    sources = zeroshot_report.choose_runs(F.checkpoint, F.names, F.group)
    distributed.initialize()
    changes = {name: F[name].value for name in _OF_DATASETS}
    settings = command_line.gin_settings(), F.dataset, changes, F.batch_size, F.samples
    rows = zeroshot_report.evaluate(sources, *settings)
    zeroshot_report.make_report(rows).write('het_plugin.zeroshot', json=F.json)


if __name__ == '__main__':
  command_line.run(main)
