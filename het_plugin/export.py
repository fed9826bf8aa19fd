"""Writes a run's parameters as others read them.

    python -m het_plugin.export --checkpoint=runs/het_xl --output=het_xl.npz
    python -m het_plugin.export --checkpoint=runs/het_xl --output=runs/het_xl_t5x

A ViT comes out under vision_transformer's names, a ResNet (v2) under Big Transfer's, a
heteroscedastic head under uncertainty-baselines'; .npz or .safetensors by the name of the output.
Of a contrastive model it is the image tower, for which there are such names.
The configuration is the run's own config.gin. `RestoreCheckpointConfig.path` reads such files.
A directory gets the checkpoint as t5x has it, with the state of the optimizer, to go on there
(docs/t5x.md).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from het_plugin import weights
from het_plugin.config import command_line, trained_run


def define_flags() -> None:
  command_line.define_flags()
  flags.DEFINE_string('checkpoint', None, "A run's directory; its newest checkpoint.")
  flags.DEFINE_string(
    'output',
    None,
    'Where to write: a file, .npz or .safetensors; or the directory of a run under t5x.',
  )


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  with command_line.one_sentence_errors():
    checkpoint, output = flags.FLAGS.checkpoint, flags.FLAGS.output
    for name, value in (('checkpoint', checkpoint), ('output', output)):
      if not value:
        raise ValueError(f'--{name} is not set')
    is_file = Path(output).suffix or Path(output).is_file()
    if is_file and not weights.is_weights_file(output):
      raise ValueError(f'--output={output} must end in .npz or .safetensors, or be a directory')
    from het_plugin.t5x_host import conversion
    from het_plugin.training import checkpoint_reader, optimizers

    if not weights.is_weights_file(output):
      print(f'A checkpoint of t5x: {conversion.write_t5x(checkpoint, output)}')
      return
    settings = trained_run.parse_run_config(
      checkpoint,
      flags.FLAGS.gin_file,
      flags.FLAGS.gin_bindings,
      flags.FLAGS.gin_search_paths,
      without=['partitioner'],  # of the devices that it trained on
    )
    model = settings['model']
    ema = optimizers.evaluates_ema(model.optimizer_def)
    params = checkpoint_reader.read_params(checkpoint, ema)
    num_classes = getattr(model.head, 'num_classes', None)
    if num_classes is None:
      params = {name: x for name, x in params.items() if name.startswith('backbone/')}
    num_heads = getattr(model.backbone, 'num_heads', 1)
    arrays = weights.export_params(params, num_classes or 1, num_heads)
    weights.write_arrays(output, arrays)
  size = sum(np.size(x) for x in arrays.values())
  print(f'{len(arrays)} arrays, {size / 1e6:.2f}M parameters: {output}')


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
