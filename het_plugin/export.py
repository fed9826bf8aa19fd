"""Writes a run's parameters in the format of other projects, or the run as a program for serving.

    python -m het_plugin.export --checkpoint=runs/het_xl --output=het_xl.npz
    python -m het_plugin.export --checkpoint=runs/het_xl --output=runs/het_xl_t5x

A file (.npz or .safetensors) has a ViT under vision_transformer's names, a ResNet (v2) under Big
Transfer's, and a heteroscedastic head under uncertainty-baselines'. Of a contrastive model only the
image tower is written. The configuration is the run's own config.gin.
`RestoreCheckpointConfig.path` reads such files. The metadata of a .safetensors file say what it is:
head, link, temperature, class names and images. If --output is a directory, a checkpoint of t5x
with the state of the optimizer is written, to continue there (docs/t5x.md).

    python -m het_plugin.export --checkpoint=runs/het_xl --output=het_xl_program --format=onnx

With --format, the folder --output gets a program from images, or features, to probabilities that
runs without het_plugin (docs/serve.md).

    python -m het_plugin.export --check=het_xl_program

With --check, the program there is run on the input that its folder holds, and its outputs are
compared with those of the model that was exported.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags

from het_plugin.cli import command_line
from het_plugin.config import changes
from het_plugin.evaluation import serve
from het_plugin.runs import configuration, open_run
from het_plugin.weights import is_weights_file, programs, write_arrays


def define_flags() -> None:
  command_line.define_flags()
  flags.DEFINE_string('checkpoint', None, "A run's directory; its newest checkpoint.")
  flags.DEFINE_string(
    'output',
    None,
    'Where to write: a file, .npz or .safetensors; or the directory of a run under t5x, or of a '
    'program.',
  )
  flags.DEFINE_string(
    'format', None, f'Of a program for serving: {", ".join(programs.NEEDED)}. None: parameters.'
  )
  flags.DEFINE_bool('entropies', False, 'Whether a program gives entropies too.')
  flags.DEFINE_string('check', None, 'A program that is there, a folder or a file: it is compared.')


def main(argv: Sequence[str]) -> None:
  with command_line.one_sentence_errors(argv):
    if flags.FLAGS.check:
      others = 'checkpoint', 'output', 'format', 'entropies', 'gin_file', 'gin_bindings'
      command_line.check_unused(others, '--check')
      for name, difference in programs.compare(flags.FLAGS.check).items():
        print(f'{name}: differs by at most {difference:.1g}')
      return
    checkpoint = flags.FLAGS.checkpoint
    output = flags.FLAGS.output
    for name, value in (('checkpoint', checkpoint), ('output', output)):
      if not value:
        raise ValueError(f'--{name} is not set')
    if flags.FLAGS.format:
      _export_program(checkpoint, output, flags.FLAGS.format)
      return
    if flags.FLAGS.entropies:
      raise ValueError('--entropies are outputs of a program: set --format')
    # A folder may have a version in its name: 'runs/birds_v1.5'.
    is_file = Path(output).suffix[1:2].isalpha() or Path(output).is_file()
    if is_file and not is_weights_file(output) and not Path(output).is_dir():
      raise ValueError(f'--output={output} must end in .npz or .safetensors, or be a directory')
    if not is_weights_file(output):
      folder = Path(output)
      of_a_run = any(folder.glob('checkpoint_*')) or (folder / changes.CONFIG).exists()
      if folder.is_dir() and any(folder.iterdir()) and not of_a_run:
        raise ValueError(
          f'--output={output} is a folder with other files: name a new one, or that of a run'
        )
      from het_plugin.hosts.t5x import conversion

      gin_files, gin_bindings, _ = command_line.gin_settings()
      if gin_files or gin_bindings:
        raise ValueError(
          'a checkpoint of t5x has the configuration of its run: it takes no --gin_file and no '
          'bindings'
        )
      print(f'A checkpoint of t5x: {conversion.write_t5x(checkpoint, output)}')
      return
    config = configuration(checkpoint, *command_line.gin_settings())
    arrays = config.published_params()
    write_arrays(output, arrays, config.describe())
  size = sum(np.size(x) for x in arrays.values())
  print(f'{len(arrays)} arrays, {size / 1e6:.2f}M parameters: {output}')


def _export_program(checkpoint: str, output: str, kind: str) -> None:
  programs.check(output, kind)
  run = open_run(checkpoint, *command_line.gin_settings())
  about = serve.export(run, output, kind, entropies=flags.FLAGS.entropies)
  outputs = ', '.join(f'{name} {x["shape"]}' for name, x in about['outputs'].items())
  print(f'A program ({kind}): {output}')
  print(f'{about["input"]["name"]} {about["input"]["shape"]} -> {outputs}')


if __name__ == '__main__':
  command_line.run(main)
