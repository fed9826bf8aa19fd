"""Few-shot linear evaluation of saved representations, or of checkpoints.

    python -m het_plugin.fewshot --train=det/train.npz --test=det/test.npz --shots=1,5,10,25
    python -m het_plugin.fewshot --checkpoint=runs/det --checkpoint=runs/het_xl --datasets=digits

--train, --test and --checkpoint may be repeated; every run is compared with the first, paired.
Prints accuracies with standard errors over draws, their averages over data sets and settings (table
22 of Collier et al. 2023), and differences; --json and --html write them too. --results=A.json
shows results of earlier calls next to them.

A run's name is METHOD or METHOD/SETTING; averages are over data sets and the settings of a method.
Several labels of an example are votes. The most frequent one counts.

Files of several data sets make one run under --names=RUN:DATASET,RUN:DATASET.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from absl import flags

from het_plugin.cli import command_line
from het_plugin.evaluation import fewshot as report
from het_plugin.measures import fewshot
from het_plugin.system import distributed, flag_values

_OF_CHECKPOINTS = ('datasets', 'splits', 'layer', 'batch_size')  # flags that belong to --checkpoint
_OF_FITS = ('protocol', 'classifier', 'draw', 'l2', 'shots', 'seeds')  # of --train or --checkpoint


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  source = (
    'F.npz, F.safetensors or X.npy,Y.npy; F.npz:SPLIT if it has several; a run, or a task; '
    'repeatable.'
  )
  flags.DEFINE_multi_string('train', [], f'Representations that shots are drawn from: {source}')
  flags.DEFINE_multi_string('test', [], f'Representations to measure accuracies on: {source}')
  flags.DEFINE_multi_string(
    'checkpoint', [], "A run's directory, a checkpoint in it, .npz or .safetensors; repeatable."
  )
  flags.DEFINE_list(
    'datasets',
    None,
    'For checkpoints: tasks, .npz files or folders, TASK or NAME=TASK; by default those that gin '
    'files bind to FewShotAction.datasets, else digits and glyphs_heldout.',
  )
  flags.DEFINE_list(
    'splits',
    None,
    'Training and test split of --datasets; by default train, and test or else validation.',
  )
  flags.DEFINE_alias('dataset', 'datasets')
  flags.DEFINE_alias('split', 'splits')
  flags.DEFINE_list(
    'names', None, 'Names of the runs: METHOD or METHOD/SETTING; for files also RUN:DATASET.'
  )
  flags.DEFINE_multi_string(
    'results', [], 'A --json file of an earlier call, shown in the same tables; repeatable.'
  )
  flags.DEFINE_enum(
    'protocol', 'loo', list(fewshot.PROTOCOLS), 'A named combination of the following three.'
  )
  flags.DEFINE_enum('classifier', None, fewshot.CLASSIFIERS, 'By default from the protocol.')
  flags.DEFINE_enum('draw', None, fewshot.DRAWS, 'By default from the protocol.')
  flags.DEFINE_string(
    'l2', None, f'A number or {", ".join(fewshot.L2_RULES)}; by default from the protocol.'
  )
  flags.DEFINE_list('shots', ['1', '5', '10', '25'], "Examples per class; 'all' takes every one.")
  flags.DEFINE_list('seeds', ['0', '1', '2'], 'One subset is drawn for each.')
  flags.DEFINE_string('layer', 'pre_logits', "The checkpoints' representation.")
  flags.DEFINE_integer('batch_size', 256, 'Global batch of the extraction.', lower_bound=1)
  flags.DEFINE_string('json', None, 'Where all results are written.')
  flags.DEFINE_string('html', None, 'Where to write the results as a page with plots.')


def check_flags() -> None:
  F = flags.FLAGS
  if len(F.train) != len(F.test):
    raise ValueError(
      f'--train is given {len(F.train)} times and --test {len(F.test)} times; each run needs both'
    )
  if F.train and F.checkpoint:
    raise ValueError('--train and --checkpoint cannot go together: represent the checkpoints first')
  if not (F.train or F.checkpoint or F.results):
    raise ValueError('--train and --test, --checkpoint, or --results are needed')
  given = [x for x in (*_OF_CHECKPOINTS, 'gin_file', 'gin_bindings') if F[x].present]
  if given and not F.checkpoint:
    raise ValueError(f'--{given[0]} is for --checkpoint, whose representations are computed here')
  if not (F.train or F.checkpoint):
    command_line.check_unused(_OF_FITS, '--results alone, which are shown as they are')
  if F.splits is not None and len(F.splits) != 2:
    raise ValueError(f'--splits={",".join(F.splits)} must be a training and a test split')


def settings() -> dict[str, Any]:
  """Protocol, shots and seeds."""
  F = flags.FLAGS
  parts = {name: F[name].value for name in ('classifier', 'draw') if F[name].value}
  if F.l2 is not None:
    parts['l2'] = flag_values.positive_or_word('l2', F.l2, fewshot.L2_RULES)
  return {
    'protocol': dataclasses.replace(fewshot.PROTOCOLS[F.protocol], **parts),
    'shots': [n if n == 'all' else flag_values.integers('shots', [n], 1)[0] for n in F.shots],
    'seeds': flag_values.integers('seeds', F.seeds),
  }


def evaluate(chosen: dict[str, Any]) -> report.Results:
  F = flags.FLAGS
  if not F.checkpoint:
    return report.from_files(F.names, F.train, F.test, **chosen)
  of_checkpoints = {name: F[name].value for name in _OF_CHECKPOINTS}
  gin_settings = command_line.gin_settings()
  return report.from_checkpoints(F.names, F.checkpoint, gin_settings, **of_checkpoints, **chosen)


def main(argv: Sequence[str]) -> None:
  F = flags.FLAGS
  with command_line.one_sentence_errors(argv):
    chosen = settings()
    check_flags()
    distributed.initialize()
    protocol = {'name': F.protocol, **dataclasses.asdict(chosen['protocol'])}
    earlier = report.read_results(F.results)
    made = report.make_report(protocol, earlier, evaluate(chosen))
    made.write('het_plugin.fewshot', json=F.json, html=F.html)


if __name__ == '__main__':
  command_line.run(main)
