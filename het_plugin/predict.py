"""Predicts the classes of images without labels.

    python -m het_plugin.predict --checkpoint=runs/het_xl --dataset=photos --csv=predictions.csv

prints the most probable classes of each image with their probabilities, and the entropy of the
predictive distribution in nats. --dataset is an image file, a folder that is searched for .jpg and
.png files, or a .npz file with an array 'image' [N, H, W] or [N, H, W, C] of uint8, or of floats in
[0, 1]. Images that cannot be read are left out. A file of predictions, as
`het_plugin.evaluate --save_predictions` writes them, may take the place of checkpoint and data set.
"""

from collections.abc import Sequence

import jax
from absl import flags

from het_plugin import reporting
from het_plugin.cli import command_line
from het_plugin.evaluation import predict
from het_plugin.rows import read
from het_plugin.runs import open_run
from het_plugin.system import distributed
from het_plugin.weights import is_weights_file


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  flags.DEFINE_string(
    'checkpoint', None, "A run's directory, a checkpoint in it, or a file of predictions."
  )
  flags.DEFINE_string('dataset', None, 'An image file, a folder of images, or a .npz file.')
  flags.DEFINE_integer('top', 5, 'Classes per image at most.', lower_bound=1)
  flags.DEFINE_integer('batch_size', 256, 'Global batch.', lower_bound=1)
  flags.DEFINE_string('csv', None, 'Where all rows are written as CSV.')
  flags.DEFINE_string('json', None, 'Where all rows are written as JSON.')


def main(argv: Sequence[str]) -> None:
  F = flags.FLAGS
  with command_line.one_sentence_errors(argv):
    if not F.checkpoint:
      raise ValueError('--checkpoint is needed')
    if is_weights_file(F.checkpoint):
      if F.dataset:
        raise ValueError(
          f'--checkpoint={F.checkpoint} is a file: with --dataset it must be the directory of a '
          'run. A file of predictions goes without --dataset.'
        )
      unused = 'batch_size', 'gin_file', 'gin_bindings'
      command_line.check_unused(unused, 'a file of predictions')
      found = predict.most_probable(read(F.checkpoint, 'log_prob'), F.top)
    else:
      if not F.dataset:
        raise ValueError(f'--dataset is needed for the run --checkpoint={F.checkpoint}')
      images = predict.Images(F.dataset)  # before the model: its path may be wrong
      distributed.initialize()
      run = open_run(F.checkpoint, *command_line.gin_settings())
      found = predict.predict(run, images, F.top, F.batch_size)
    if jax.process_index() == 0:
      print(predict.table(found))
      if F.csv:
        predict.write_csv(found, F.csv)
      if F.json:
        reporting.write_json(found, F.json)


if __name__ == '__main__':
  command_line.run(main)
