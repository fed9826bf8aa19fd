"""Chooses among checkpoints by files of their representations or predictions; runs no model.

    python -m het_plugin.select knn --train=a/train.npz,b/train.npz --k=1,5,20
    python -m het_plugin.select rank --train=a/train.npz,b/train.npz --test=a/test.npz,b/test.npz
    python -m het_plugin.select rankme --train=a/train.npz,b/train.npz
    python -m het_plugin.select ensemble --validation=a/val.npz,b/val.npz

`knn`: k-nearest-neighbour accuracy, on test files or leaving out each training example in turn.
`rank`: that as a proxy for all candidates, and few-shot accuracy of the --keep best of them.
`rankme`: effective rank of the representations. `ensemble`: greedy selection of members by their
validation NLL, from the files that `het_plugin.evaluate --save_predictions` writes.

There is one file per candidate, separated by commas or with a flag each: representations (.npz,
.safetensors, F.npz:split, or X.npy,Y.npy) or predictions. Every subcommand takes --names, --json,
--png and --html; a flag that a subcommand does not read is an error.

Exit codes: 0 done; 2 a setting or a file is wrong.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from het_plugin.config import command_line, flag_values
from het_plugin.evaluation import knn, rankme, selection
from het_plugin.evaluation.candidates import split_sources

# {subcommand: (what it computes, the flags that it reads)}
SUBCOMMANDS = {
  'knn': (selection.knn, ('train', 'test', 'k', 'metric')),
  'rank': (selection.rank, ('train', 'test', 'k', 'metric', 'keep', 'shots', 'seeds', 'l2')),
  'rankme': (selection.rankme, ('train', 'max_examples')),
  'ensemble': (selection.ensemble, ('validation', 'test', 'max_members', 'replacement')),
}


def define_flags() -> None:
  flags.DEFINE_multi_string('train', [], 'Representations of the training split.')
  flags.DEFINE_multi_string('validation', [], 'Predictions for the validation split.')
  flags.DEFINE_multi_string('test', [], 'The same for the test split, in the same order.')
  flags.DEFINE_list('names', None, 'Names of the candidates; by default where their paths differ.')
  flags.DEFINE_list('k', ['1'], 'Numbers of neighbours; a single one for rank.')
  flags.DEFINE_enum('metric', 'euclidean', knn.METRICS, 'Distance of neighbours.')
  flags.DEFINE_string('keep', '1', "Number of candidates to evaluate few-shot, or 'all'.")
  flags.DEFINE_list('shots', ['1', '5', '10', '25'], 'Examples per class.')
  flags.DEFINE_list('seeds', ['0', '1', '2'], 'One few-shot subset is drawn for each.')
  flags.DEFINE_string('l2', 'loo', "Few-shot regularisation: 'loo', 'heldout' or a strength.")
  flags.DEFINE_integer(
    'max_examples', rankme.MAX_EXAMPLES, 'If there are more, a random choice of this many is used.'
  )
  flags.DEFINE_integer('max_members', 10, 'Largest number of members, repetitions included.')
  flags.DEFINE_bool('replacement', True, 'Whether a member may be added again.')
  flags.DEFINE_string('json', None, 'Where the results are written as JSON.')
  flags.DEFINE_string('png', None, 'Where the plot is written.')
  flags.DEFINE_string('html', None, 'Where table, plot and command are written as a page.')


def value_of(flag: str) -> Any:
  """The value of a flag as the subcommands take it."""
  value = flags.FLAGS[flag].value
  if flag in ('train', 'validation', 'test'):
    return [source for text in value for source in split_sources(text)]
  if flag in ('k', 'shots', 'seeds'):
    return flag_values.integers(flag, value, least=0 if flag == 'seeds' else 1)
  return flag_values.positive_or_word('l2', value, ['loo', 'heldout']) if flag == 'l2' else value


def main(argv: Sequence[str]) -> None:
  with command_line.one_sentence_errors():
    if len(argv) != 2 or argv[1] not in SUBCOMMANDS:
      raise ValueError(f'{" ".join(["select", *argv[1:]])}: write one of {", ".join(SUBCOMMANDS)}')
    compute, read = SUBCOMMANDS[argv[1]]
    for flag in {flag for _, others in SUBCOMMANDS.values() for flag in others}.difference(read):
      if flags.FLAGS[flag].present:
        readers = ', '.join(name for name, (_, others) in SUBCOMMANDS.items() if flag in others)
        raise ValueError(f'--{flag} means nothing for {argv[1]}; it is for {readers}')
    result = compute(names=flags.FLAGS.names, **{flag: value_of(flag) for flag in read})
    values = flags.FLAGS
    result.write('het_plugin.select', json=values.json, png=values.png, html=values.html)


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
