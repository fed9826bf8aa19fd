"""Predicts the classes of images without labels.

    python -m het_plugin.predict --checkpoint=runs/het_xl --dataset=photos --csv=predictions.csv

prints the most probable classes of each image with their probabilities, and the entropy of the
predictive distribution in nats. --dataset is an image file, a folder that is searched for .jpg and
.png files, or a .npz file with an array 'image' [N, H, W] or [N, H, W, C] of uint8, or of floats in
[0, 1]. Images that cannot be read are left out.
"""

from collections.abc import Sequence

import jax
from absl import flags

from het_plugin import reporting
from het_plugin.config import command_line, distributed, trained_run
from het_plugin.evaluation import predict, predictions


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  flags.DEFINE_string('checkpoint', None, "A run's directory, or a checkpoint in it.")
  flags.DEFINE_string('dataset', None, 'An image file, a folder of images, or a .npz file.')
  flags.DEFINE_integer('top', 5, 'Classes per image at most.', lower_bound=1)
  flags.DEFINE_integer('batch_size', 256, 'Global batch.', lower_bound=1)
  flags.DEFINE_string('csv', None, 'Where all rows are written as CSV.')
  flags.DEFINE_string('json', None, 'Where all rows are written as JSON.')


def main(argv: Sequence[str]) -> None:
  F = flags.FLAGS
  with command_line.one_sentence_errors(argv):
    for name in ('checkpoint', 'dataset'):
      if not F[name].value:
        raise ValueError(f'--{name} is needed')
    predictions.check_has_head(F.checkpoint)
    distributed.initialize()
    run = trained_run.open_run(F.checkpoint, *command_line.gin_settings())
    rows = predict.predict(run, F.dataset, F.top, F.batch_size)
    if jax.process_index() == 0:
      print(predict.table(rows))
      if F.csv:
        predict.write_csv(rows, F.csv)
      if F.json:
        reporting.write_json(rows, F.json)


if __name__ == '__main__':
  command_line.run(main)
