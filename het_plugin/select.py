"""Chooses among checkpoints by what they left in files: representations or predictions.

    python -m het_plugin.select knn --train=a/train.npz,b/train.npz --k=1,5,20
    python -m het_plugin.select rank --train=a/train.npz,b/train.npz --test=a/test.npz,b/test.npz
    python -m het_plugin.select rankme --train=a/train.npz,b/train.npz
    python -m het_plugin.select ensemble --validation=a/val.npz,b/val.npz

`knn`: k-nearest-neighbour accuracy, on test files or leaving out each training example in turn.
`rank`: that as a proxy for all candidates, few-shot accuracy for the --keep best of them.
`rankme`: effective rank of the representations. `ensemble`: greedy selection of members by their
validation NLL, from what `het_plugin.evaluate --save_predictions` keeps. One file a candidate, with
commas between or a flag each; files of representations as `evaluation/representations.py` describes
(.npz, .safetensors, F.npz:split, or X.npy,Y.npy), of predictions as `evaluation/predictions.py`
does. All take --names, --json, --png and --html; a flag that a subcommand does not read is an
error.

Exit codes: 0 done; 2 a setting or a file is wrong.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from het_plugin import reporting
from het_plugin.config import command_line, flag_values
from het_plugin.evaluation import FewShotResult, checkpoint_ranking, few_shot, fewshot, knn, rankme
from het_plugin.evaluation.candidates import (
  check_representations,
  read_softmax_predictions,
  same_predictions,
  split_sources,
)
from het_plugin.evaluation.greedy_ensemble import greedy_ensemble, mixture_log_prob
from het_plugin.evaluation.names import short_names
from het_plugin.evaluation.representations import read_representations


def define_flags() -> None:
  flags.DEFINE_multi_string('train', [], 'Representations of the training split.')
  flags.DEFINE_multi_string('validation', [], 'Predictions for the validation split.')
  flags.DEFINE_multi_string('test', [], 'The same of the test split, in the same order.')
  flags.DEFINE_list('names', None, 'Names of the candidates; else what tells their paths apart.')
  flags.DEFINE_list('k', ['1'], 'Numbers of neighbours; for rank, one.')
  flags.DEFINE_enum('metric', 'euclidean', knn.METRICS, 'Distance of neighbours.')
  flags.DEFINE_string('keep', '1', "How many candidates get a few-shot evaluation, or 'all'.")
  flags.DEFINE_list('shots', ['1', '5', '10', '25'], 'Examples a class.')
  flags.DEFINE_list('seeds', ['0', '1', '2'], 'A few-shot subset is drawn for each.')
  flags.DEFINE_string('l2', 'loo', "Few-shot regularisation: 'loo', 'heldout' or a strength.")
  flags.DEFINE_integer(
    'max_examples',
    rankme.MAX_EXAMPLES,
    'Of more, a random choice of so many is decomposed.',
  )
  flags.DEFINE_integer('max_members', 10, 'Most members, counted with their repetitions.')
  flags.DEFINE_bool('replacement', True, 'Whether a member may be added again.')
  flags.DEFINE_string('json', None, 'Where the results are written as JSON.')
  flags.DEFINE_string('png', None, 'Where the plot is drawn.')
  flags.DEFINE_string('html', None, 'Where table, plot and command are written as a page.')


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
  """What a subcommand found.

  Attributes:
    title, introduction: of the page.
    rows: a candidate or an ensemble each (see `reporting.columns`), best first.
    notes: lines below the table.
    caption: of the plot.
    draw: makes the plot, a PNG.
    json: all numbers.
  """

  title: str
  introduction: str
  rows: Sequence[Mapping[str, Any]]
  notes: Sequence[str]
  caption: str
  draw: Callable[[], bytes]
  json: Mapping[str, Any]


def run_knn() -> Result:
  """k-nearest-neighbour accuracy of every candidate."""
  FLAGS = flags.FLAGS
  ks = flag_values.integers('k', FLAGS.k, least=1)
  train, test, names = _sources('train', 'test')
  check_representations(train, test)
  rows = []
  for i, name in enumerate(names):
    accuracy, dim = _knn_accuracy(train[i], test[i] if test else None, ks)
    rows.append({'candidate': name, 'pre_logits_dim': dim, 'accuracy': accuracy})
  rows.sort(key=lambda row: -row['accuracy'][ks[0]])
  lines = {row['candidate']: (ks, [row['accuracy'][k] for k in ks]) for row in rows}
  measured = 'the test examples' if test else 'the training examples, each left out in turn'
  return Result(
    title='k-nearest-neighbour accuracy',
    introduction=f'Accuracy of the vote of the k nearest training examples ({FLAGS.metric} '
    f'distance) on {measured}.',
    rows=[
      {'head': row['candidate'], 'pre_logits_dim': row['pre_logits_dim']}
      | {f'k = {k}': f'{accuracy:.4f}' for k, accuracy in row['accuracy'].items()}
      for row in rows
    ],
    notes=[f'accuracy on {measured}; {FLAGS.metric} distance'],
    caption='Accuracy against the number of neighbours.',
    draw=lambda: reporting.lines_png(
      lines, xlabel='neighbours k', ylabel='accuracy', log_x=True, whole_steps=True
    ),
    json={'metric': FLAGS.metric, 'leave_one_out': not test, 'rows': rows},
  )


def run_rank() -> Result:
  """The kNN proxy of every candidate, and few-shot accuracy of the best by it."""
  FLAGS = flags.FLAGS
  ks = flag_values.integers('k', FLAGS.k, least=1)
  shots = flag_values.integers('shots', FLAGS.shots, least=1)
  seeds = flag_values.integers('seeds', FLAGS.seeds)
  if len(ks) != 1:
    raise ValueError(f'--k={",".join(FLAGS.k)} must be one number for rank, the k of its proxy')
  l2 = flag_values.positive_or_word('l2', FLAGS.l2, ['loo', 'heldout'])
  fewshot.check_settings(shots, seeds, l2)
  train, test, names = _sources('train', 'test')
  if not test:
    raise ValueError('--test is not set; rank measures few-shot accuracy on test files')
  choices = {'all': len(names)} | {str(n): n for n in range(1, len(names) + 1)}
  if FLAGS.keep not in choices:
    raise ValueError(f"--keep={FLAGS.keep} must be in 1 .. {len(names)}, the candidates, or 'all'")
  keep = choices[FLAGS.keep]
  check_representations(train, test)

  proxy = [_knn_accuracy(source, None, ks)[0][ks[0]] for source in train]
  order = checkpoint_ranking.best_first(proxy)
  kept = order[:keep]
  results = {i: _few_shot(train[i], test[i], shots=shots, seeds=seeds, l2=l2) for i in kept}
  # {shots: (proxies, accuracies)}
  points = {n: ([proxy[i] for i in kept], [results[i][n].mean for i in kept]) for n in shots}
  measured = points if keep == len(names) else {}
  agreements = {n: checkpoint_ranking.agreement(*pair) for n, pair in measured.items()}
  proxy_name = f'kNN accuracy, k = {ks[0]}'
  return Result(
    title='Candidates for a task',
    introduction=f'All candidates by the leave-one-out {proxy_name} ({FLAGS.metric} distance) on '
    f'the training examples, and few-shot accuracy on the test examples of the best {keep}.',
    rows=[
      {
        'head': names[i],
        proxy_name: f'{proxy[i]:.4f}',
        'fewshot': {n: result.mean for n, result in results.get(i, {}).items()},
        'fewshot_stderr': {n: result.stderr for n, result in results.get(i, {}).items()},
      }
      for i in order
    ],
    notes=[_agreement_line(n, found) for n, found in agreements.items()]
    or [f'few-shot accuracy of the best {keep} of {len(names)}; --keep=all measures the proxy'],
    caption='Few-shot accuracy against the proxy.',
    draw=lambda: reporting.scatter_png(
      {f'{n} shot{"s" * (n > 1)}': pair for n, pair in points.items()},
      [names[i] for i in kept],
      xlabel=f'{proxy_name}, leave-one-out',
      ylabel='few-shot accuracy',
    ),
    json={
      'metric': FLAGS.metric,
      'k': ks[0],
      'rows': [
        {
          'candidate': names[i],
          'proxy': proxy[i],
          'few_shot': {n: result.record() for n, result in results.get(i, {}).items()},
        }
        for i in order
      ],
      'agreement': {n: dataclasses.asdict(found) for n, found in agreements.items()},
    },
  )


def run_rankme() -> Result:
  """RankMe of every candidate, with its spectrum."""
  limit = flags.FLAGS.max_examples
  if limit < 1:
    raise ValueError(f'--max_examples={limit} must be at least 1')
  train, _, names = _sources('train')
  check_representations(train)
  rows = []
  for name, source in zip(names, train, strict=True):
    features = read_representations(source).features
    sigma = rankme.singular_values(features, limit)
    rows.append(
      {
        'candidate': name,
        'rankme': rankme.rankme(sigma),
        'pre_logits_dim': features.shape[1],
        'num_examples': min(limit, len(features)),
        'singular_values': sigma,
      }
    )
  rows.sort(key=lambda row: -row['rankme'])
  spectra = {row['candidate']: _spectrum(row['singular_values']) for row in rows}
  return Result(
    title='RankMe',
    introduction='Effective rank of the representations: the exponential of the entropy of their '
    'singular values (Garrido et al. 2023, eq. 1).',
    rows=[
      {
        'head': row['candidate'],
        'pre_logits_dim': row['pre_logits_dim'],
        'examples': row['num_examples'],
        'RankMe': row['rankme'],
      }
      for row in rows
    ],
    notes=['from 1 to the smaller of D and the number of examples'],
    caption='Singular values over the largest.',
    draw=lambda: reporting.lines_png(
      spectra, xlabel='k', ylabel='singular value / largest', log_x=True, log_y=True
    ),
    json={'rows': rows},
  )


def run_ensemble() -> Result:
  """A greedy ensemble beside the best single candidate and the average of all."""
  FLAGS = flags.FLAGS
  if FLAGS.max_members < 1:
    raise ValueError(f'--max_members={FLAGS.max_members} must be at least 1')
  validation, test, names = _sources('validation', 'test')
  # The test files too are all read before anything is computed, for what is wrong with them.
  labels, num_classes = [], None
  for read in same_predictions(validation):
    labels.append(read.label_log_prob)
    num_classes = read.log_prob.shape[1]
  for _ in same_predictions(test, num_classes):
    pass

  found = greedy_ensemble(
    np.stack(labels), max_members=FLAGS.max_members, replacement=FLAGS.replacement
  )
  shares = found.weights(len(names))
  best = found.members[0]  # the first step looks for the best single one
  ensembles = {
    'greedy ensemble': shares,
    f'best single: {names[best]}': np.eye(len(names))[best],
    'average of all': np.full(len(names), 1 / len(names)),
  }
  rows = [
    {'ensemble': name, 'num_members': int((weights > 0).sum())}
    for name, weights in ensembles.items()
  ]
  splits = {'validation': validation} | ({'test': test} if test else {})
  for split, sources in splits.items():
    scores = _scores(sources, np.stack(list(ensembles.values())))
    for row, (nll, accuracy) in zip(rows, scores, strict=True):
      row |= {f'{split}_nll': nll, f'{split}_accuracy': accuracy}
  members = sorted(set(found.members), key=lambda i: -shares[i])
  path = (range(1, len(found.nll) + 1), found.nll)
  steps = [
    f'{i + 1}. {names[member]}: validation NLL {nll:.4f}'
    for i, (member, nll) in enumerate(zip(found.members, found.nll, strict=True))
  ]
  return Result(
    title='Greedy ensemble',
    introduction=f'Members out of {len(names)} candidates, added one by one for the smallest '
    f'validation NLL {"with" if FLAGS.replacement else "without"} replacement; an ensemble '
    'predicts the average of probabilities.',
    rows=[
      {'head': row['ensemble'], 'members': row['num_members']}
      | {
        f'{split} {title}': f'{row[f"{split}_{name}"]:.4f}'
        for split in splits
        for title, name in (('NLL', 'nll'), ('accuracy', 'accuracy'))
      }
      for row in rows
    ],
    notes=[
      'members: ' + ', '.join(f'{names[i]} {shares[i]:.3g}' for i in members),
      *steps,
    ],
    caption='Validation NLL by number of members.',
    draw=lambda: reporting.lines_png(
      {'validation NLL': path}, xlabel='members', ylabel='validation NLL', whole_steps=True
    ),
    json={
      'rows': rows,
      'members': [{'candidate': names[i], 'weight': shares[i]} for i in members],
      'steps': [
        {'candidate': names[member], 'validation_nll': nll}
        for member, nll in zip(found.members, found.nll, strict=True)
      ],
    },
  )


# {subcommand: (what it does, the flags that it reads beside --names and the outputs)}
SUBCOMMANDS = {
  'knn': (run_knn, ('train', 'test', 'k', 'metric')),
  'rank': (run_rank, ('train', 'test', 'k', 'metric', 'keep', 'shots', 'seeds', 'l2')),
  'rankme': (run_rankme, ('train', 'max_examples')),
  'ensemble': (run_ensemble, ('validation', 'test', 'max_members', 'replacement')),
}


def _sources(first: str, second: str | None = None) -> tuple[list[str], list[str], list[str]]:
  """Sources of two flags, the second's may be none, and the candidates' names."""
  sources = {
    flag: [source for text in flags.FLAGS[flag].value for source in split_sources(text)]
    for flag in filter(None, (first, second))
  }
  candidates, others = sources[first], sources.get(second, [])
  if not candidates:
    raise ValueError(f'--{first} is not set: give it a file for each candidate')
  if len(set(candidates)) != len(candidates):
    twice = next(source for source in candidates if candidates.count(source) > 1)
    raise ValueError(f'--{first} names {twice} twice; candidates must differ')
  if others and len(others) != len(candidates):
    raise ValueError(
      f'--{second} has {len(others)} files and --{first} {len(candidates)}: one a candidate'
    )
  names = flags.FLAGS.names
  if names is None:
    return candidates, others, short_names(candidates)
  if len(names) != len(candidates) or len(set(names)) != len(names) or not all(names):
    raise ValueError(
      f'--names={",".join(names)} must be {len(candidates)} different names, one a file of '
      f'--{first}'
    )
  return candidates, others, list(names)


def _knn_accuracy(train: str, test: str | None, ks: Sequence[int]) -> tuple[dict[int, float], int]:
  """({k: accuracy}, D) of a candidate; of its training examples left out where test is None."""
  train_split = read_representations(train)
  test_split = read_representations(test) if test else None
  accuracy = knn.knn_accuracy(
    train_split.features,
    train_split.label,
    test_split and test_split.features,
    test_split and test_split.label,
    ks=ks,
    metric=flags.FLAGS.metric,
  )
  return accuracy, train_split.features.shape[1]


def _few_shot(train: str, test: str, **settings) -> dict[int, FewShotResult]:
  """{shots: result} of a candidate."""
  train_split, test_split = read_representations(train), read_representations(test)
  return few_shot(
    train_split.features,
    train_split.label,
    test_split.features,
    test_split.label,
    train_index=train_split.index,
    **settings,
  )


def _spectrum(sigma: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(k, sigma_k / sigma_1) without what is only rounding."""
  relative = sigma / sigma[0]
  relative = relative[relative > len(sigma) * np.finfo(np.float64).eps]
  return np.arange(1, len(relative) + 1), relative


def _scores(sources: Sequence[str], weights: np.ndarray) -> list[tuple[float, float]]:
  """(NLL, accuracy) of mixtures of the candidates with weights [E, C]."""
  label = read_softmax_predictions(sources[0]).label
  log_probs = mixture_log_prob(
    (read_softmax_predictions(source).log_prob for source in sources), weights
  )
  scores = []
  for log_prob in log_probs:  # [N, K]
    nll = -np.take_along_axis(log_prob, label[:, None], axis=1).mean()
    scores.append((float(nll), float(np.mean(log_prob.argmax(axis=1) == label))))
  return scores


def _agreement_line(shots: int, found: checkpoint_ranking.Agreement) -> str:
  tau = 'undefined' if found.kendall_tau is None else f'{found.kendall_tau:.3f}'
  regret = ', '.join(f'{x:.3f}' for x in found.regret)
  return f"{shots} shots: Kendall's tau {tau}; regret of keeping the best 1, 2, ...: {regret}"


def _check_flags(subcommand: str) -> None:
  """Raises ValueError for a flag that is given and not read."""
  readers = {}
  for name, (_, read) in SUBCOMMANDS.items():
    for flag in read:
      readers.setdefault(flag, []).append(name)
  for flag, names in readers.items():
    if flags.FLAGS[flag].present and subcommand not in names:
      raise ValueError(f'--{flag} means nothing for {subcommand}; it is for {", ".join(names)}')


def _write(result: Result) -> None:
  FLAGS = flags.FLAGS
  print(reporting.text_table(result.rows, row_title='candidate'))
  print('\n' + '\n'.join(result.notes))
  if FLAGS.json:
    reporting.write_json(result.json, FLAGS.json)
  if not (FLAGS.png or FLAGS.html):
    return
  png = result.draw()
  if FLAGS.png:
    Path(FLAGS.png).parent.mkdir(parents=True, exist_ok=True)
    Path(FLAGS.png).write_bytes(png)
  if FLAGS.html:
    page = reporting.html_page(
      title=result.title,
      introduction=result.introduction,
      rows=result.rows,
      row_title='candidate',
      notes=result.notes,
      figures=[reporting.Figure(png, result.caption, result.caption)],
      provenance=reporting.Provenance.of_this_process('het_plugin.select', {}),
    )
    Path(FLAGS.html).parent.mkdir(parents=True, exist_ok=True)
    Path(FLAGS.html).write_text(page)


def main(argv: Sequence[str]) -> None:
  with command_line.one_sentence_errors():
    if len(argv) != 2 or argv[1] not in SUBCOMMANDS:
      raise ValueError(
        f'select{"".join(f" {x}" for x in argv[1:])}: write one of {", ".join(SUBCOMMANDS)}'
      )
    _check_flags(argv[1])
    run, _ = SUBCOMMANDS[argv[1]]
    _write(run())


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
