"""Computes representations of a data set and saves them, one file per layer and split.

    python -m het_plugin.represent --checkpoint=runs/het_xl --dataset=digits \\
      --layers=pre_logits,block00 --output_dir=representations

writes representations/digits/pre_logits/train.safetensors and so on. Run it again to continue where
it stopped, also after SIGTERM or Ctrl-C (exit code 42); complete files stay. The checkpoint is a
run's directory, one checkpoint in it, a file of timm, transformers or open_clip, or another
published file, whose model --gin_file gives.
--arrays=FILE in place of --checkpoint and --dataset turns arrays made elsewhere into such files.
"""

from het_plugin.system import stopping

if __name__ == '__main__':
  stopping.install()  # the imports below take seconds

from collections.abc import Sequence

import jax
from absl import flags

from het_plugin import reporting
from het_plugin.cli import command_line
from het_plugin.evaluation import represent
from het_plugin.rows import files
from het_plugin.runs.run import POOLS
from het_plugin.system import distributed

_OF_FILES = ('format', 'dtype', 'overwrite')
_OF_A_MODEL = ('splits', 'layers', 'pool', 'batch_size', 'max_examples', 'image_size')


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  flags.DEFINE_string('checkpoint', None, "A run's directory, a checkpoint, .npz or .safetensors.")
  flags.DEFINE_string(
    'dataset', None, 'A task (digits, npz:PATH, image_folder:PATH, tfds:NAME ...), .npz or folder.'
  )
  flags.DEFINE_string(
    'splits', None, 'Splits, by comma; all that are finite by default. Slices: train[:2000].'
  )
  flags.DEFINE_alias('split', 'splits')
  flags.DEFINE_list('layers', ['pre_logits'], 'Representations of the backbone.')
  flags.DEFINE_enum(
    'pool', 'mean', POOLS, 'Positions of a layer are averaged, or put side by side.'
  )
  flags.DEFINE_string(
    'arrays', None, 'F.npz, F.safetensors or X.npy,Y.npy: features made elsewhere, and labels.'
  )
  flags.DEFINE_string('output_dir', None, 'Where DATASET/LAYER/SPLIT files are written.')
  flags.DEFINE_enum('format', 'safetensors', ['safetensors', 'npz'], 'Format of the files.')
  flags.DEFINE_enum('dtype', 'float32', files.DTYPES, 'Type of the features.')
  flags.DEFINE_integer('batch_size', 256, 'Global batch.', lower_bound=1)
  flags.DEFINE_integer(
    'max_examples', None, 'At most so many examples per split, chosen at random.', lower_bound=1
  )
  flags.DEFINE_integer(
    'image_size', None, 'Side in pixels; what the run was trained on by default.', lower_bound=1
  )
  flags.DEFINE_bool('overwrite', False, 'Replaces files that were made with other settings.')
  flags.DEFINE_string('json', None, 'Where the table is written as JSON.')


def main(argv: Sequence[str]) -> None:
  F = flags.FLAGS
  with command_line.one_sentence_errors(argv):
    if F.arrays is None and not (F.checkpoint and F.dataset):
      raise ValueError('--checkpoint and --dataset are needed, or --arrays')
    of_runs = 'checkpoint', 'dataset', 'gin_file', 'gin_bindings', *_OF_A_MODEL
    given = [name for name in of_runs if F[name].present]
    if F.arrays and given:
      raise ValueError(f'--{given[0]} cannot go with --arrays={F.arrays}, which are features')
    distributed.initialize()
    of_files = {name: F[name].value for name in _OF_FILES}
    if F.arrays:
      result = represent.convert(F.arrays, F.output_dir, **of_files)
    else:
      of_model = {name: F[name].value for name in _OF_A_MODEL}
      source = F.checkpoint, command_line.gin_settings(), F.dataset
      result = represent.represent(*source, F.output_dir, **of_files, **of_model)
    if jax.process_index() == 0:
      print(represent.table(result['files']), flush=True)
      if F.json:
        reporting.write_json(result, F.json)


if __name__ == '__main__':
  command_line.run(main)
