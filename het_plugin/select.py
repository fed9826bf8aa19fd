"""Chooses among checkpoints for a task.

    python -m het_plugin.select knn --train=a/train.npz,b/train.npz --k=1,5,20
    python -m het_plugin.select rank --train=a/train.npz,b/train.npz --test=a/test.npz,b/test.npz
    python -m het_plugin.select ensemble --validation=a/val.npz,b/val.npz
    python -m het_plugin.select soup --checkpoint=runs/a,runs/b --output_dir=runs/soup
    python -m het_plugin.select finetune --checkpoint=runs/a,runs/b --gin_file=task.gin \\
      --keep=1 --sweep=LEARNING_RATE=1e-4,1e-3 --output_dir=runs/finetuned

`knn`: k-nearest-neighbour accuracy, on test files or leaving out each training example in turn; and
RankMe, the effective rank of the representations. `rank`: the same as a proxy, and the few-shot
accuracy of the --keep best candidates. `ensemble`: greedy selection of members by their validation
NLL, from the files that `het_plugin.evaluate --save_predictions` writes. `soup`: the uniform and
the greedy average of the parameters. `finetune`: ranks by kNN, trains the --keep best with every
combination of --sweep, and selects an ensemble. `soup` and `finetune` read checkpoints.

Give one source per candidate, separated by commas or with a flag each. Files are representations
(.npz, .safetensors, F.npz:split, or X.npy,Y.npy) or predictions; a run, with :SPLIT or without, has
both. Every subcommand takes --names,
--json and --html. All except soup take --png. A flag that a subcommand does not read is refused.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from het_plugin.cli import command_line
from het_plugin.evaluation.candidates import split_sources
from het_plugin.measures import knn, rankme
from het_plugin.system import distributed, flag_values

_OF_RUNS = ('checkpoint', 'split', 'batch_size', 'output_dir')
_MEMBERS = ('max_members', 'replacement')
_PROXIES = ('train', 'test', 'k', 'metric', 'max_examples')
# {subcommand, a function of this module: (module, the flags that it reads)}
SUBCOMMANDS = {
  'knn': ('evaluation.select', _PROXIES),
  'rank': ('evaluation.select', (*_PROXIES, 'keep', 'shots', 'seeds', 'l2')),
  'ensemble': ('evaluation.select', ('validation', 'test', *_MEMBERS)),
  'soup': ('evaluation.soup', (*_OF_RUNS, 'dataset')),
  'finetune': (
    'experiments.finetune',
    (*_OF_RUNS, 'k', 'metric', 'keep', 'sweep', 'test_split', *_MEMBERS),
  ),
}


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  flags.DEFINE_multi_string('train', [], 'Representations of the training split.')
  flags.DEFINE_multi_string('validation', [], 'Predictions for the validation split.')
  flags.DEFINE_multi_string('test', [], 'The same files of the test split, in the same order.')
  flags.DEFINE_multi_string('checkpoint', [], 'Runs, checkpoints or published files.')
  flags.DEFINE_list(
    'names', None, 'Names of the candidates. Default: the parts in which their paths differ.'
  )
  flags.DEFINE_list('k', ['1'], 'Numbers of neighbours; the first one ranks. finetune takes one.')
  flags.DEFINE_enum('metric', 'euclidean', knn.METRICS, 'Distance of neighbours.')
  flags.DEFINE_string('keep', '1', "Number of candidates to evaluate or train, or 'all'.")
  flags.DEFINE_list('shots', ['1', '5', '10', '25'], 'Examples per class.')
  flags.DEFINE_list('seeds', ['0', '1', '2'], 'Seeds of few-shot subsets, one each.')
  flags.DEFINE_string('l2', 'loo', "Few-shot regularisation: 'loo', 'heldout' or a strength.")
  flags.DEFINE_integer(
    'max_examples',
    rankme.MAX_EXAMPLES,
    'Most examples of RankMe, chosen at random.',
    lower_bound=1,
  )
  flags.DEFINE_integer(
    'max_members', 10, 'Largest number of members, repetitions included.', lower_bound=1
  )
  flags.DEFINE_bool('replacement', True, 'Whether a member may be added again.')
  flags.DEFINE_multi_string('sweep', [], 'NAME=VALUE,VALUE: values of a gin setting.')
  flags.DEFINE_string('dataset', None, 'A task. Default: the task of the first run.')
  flags.DEFINE_string('split', 'validation', 'Split that chooses the members.')
  flags.DEFINE_string('test_split', None, 'Split that scores the ensemble.')
  flags.DEFINE_integer('batch_size', 256, 'Global batch.', lower_bound=1)
  flags.DEFINE_string('output_dir', None, 'Where soups or trained runs go.')
  flags.DEFINE_string('json', None, 'Where to write the results as JSON.')
  flags.DEFINE_string('png', None, 'Where to write the plot.')
  flags.DEFINE_string('html', None, 'Where to write table, plot and command as a page.')


def value_of(flag: str) -> Any:
  """The value of a flag as the subcommands take it."""
  value = flags.FLAGS[flag].value
  if flag in ('train', 'validation', 'test', 'checkpoint'):
    return [source for text in value for source in split_sources(text)]
  if flag in ('k', 'shots', 'seeds'):
    return flag_values.integers(flag, value, least=0 if flag == 'seeds' else 1)
  return flag_values.positive_or_word('l2', value, ['loo', 'heldout']) if flag == 'l2' else value


def main(argv: Sequence[str]) -> None:
  with command_line.one_sentence_errors():
    if len(argv) != 2 or argv[1] not in SUBCOMMANDS:
      raise ValueError(f'{" ".join(["select", *argv[1:]])}: write one of {", ".join(SUBCOMMANDS)}')
    module, read = SUBCOMMANDS[argv[1]]
    for flag in {flag for _, others in SUBCOMMANDS.values() for flag in others}.difference(read):
      if flags.FLAGS[flag].present:
        readers = ', '.join(name for name, (_, others) in SUBCOMMANDS.items() if flag in others)
        raise ValueError(f'--{flag} has no effect on {argv[1]}: {readers} read it')
    values = flags.FLAGS
    if values.png and argv[1] == 'soup':
      raise ValueError('--png has no effect on soup, which has no plot')
    compute = getattr(importlib.import_module(f'het_plugin.{module}'), argv[1])
    if 'checkpoint' in read:
      distributed.initialize()
      compute = functools.partial(compute, command_line.gin_settings())
    else:
      command_line.check_unused(['gin_file', 'gin_bindings'], f'{argv[1]}, which reads files only')
    result = compute(names=values.names, **{flag: value_of(flag) for flag in read})
    result.write('het_plugin.select', json=values.json, png=values.png, html=values.html)


if __name__ == '__main__':
  command_line.run(main)
