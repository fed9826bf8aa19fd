"""Comparisons of `het_plugin.select`, from files of the candidates' representations or predictions.

Each function takes one source per candidate (`candidates.py`), reads all of them before it computes
anything, and returns a report with the best candidate first. Errors name the program's flags.
"""

from collections.abc import Sequence

import numpy as np

from het_plugin import reporting
from het_plugin import rows as rows_lib
from het_plugin.evaluation.candidates import (
  candidate_names,
  check_representations,
  number_to_keep,
  read_softmax_predictions,
  same_predictions,
)
from het_plugin.measures import fewshot, greedy_ensemble
from het_plugin.measures import knn as neighbors
from het_plugin.measures import rankme as effective_rank
from het_plugin.measures.ranking import best_first, rank_agreement


def knn(
  *,
  train: Sequence[str],
  test: Sequence[str],
  names: Sequence[str] | None,
  k: Sequence[int],
  metric: str,
) -> reporting.Report:
  """k-nearest-neighbour accuracy of every candidate, on test files or leaving one out."""
  names = candidate_names(names, train, test)
  check_representations(train, test)
  rows = []
  for i, name in enumerate(names):
    accuracy, dim = _knn_accuracy(train[i], test[i] if test else None, k, metric)
    rows.append({'candidate': name, 'pre_logits_dim': dim, 'accuracy': accuracy})
  rows.sort(key=lambda row: -row['accuracy'][k[0]])
  lines = {row['candidate']: (k, [row['accuracy'][n] for n in k]) for row in rows}
  measured = 'the test examples' if test else 'the training examples, each left out in turn'
  return reporting.Report(
    row_title='candidate',
    title='k-nearest-neighbour accuracy',
    introduction=f'Accuracy of the vote of the k nearest training examples ({metric} distance) on '
    f'{measured}.',
    rows=[
      {'name': row['candidate'], 'pre_logits_dim': row['pre_logits_dim']}
      | {f'k = {n}': f'{accuracy:.4f}' for n, accuracy in row['accuracy'].items()}
      for row in rows
    ],
    draw=lambda: _figure(
      reporting.lines_png(
        lines, xlabel='neighbours k', ylabel='accuracy', log_x=True, whole_steps=True
      ),
      'Accuracy against the number of neighbours.',
    ),
    json={'metric': metric, 'leave_one_out': not test, 'rows': rows},
  )


def rank(
  *,
  train: Sequence[str],
  test: Sequence[str],
  names: Sequence[str] | None,
  k: Sequence[int],
  metric: str,
  keep: str,
  shots: Sequence[int],
  seeds: Sequence[int],
  l2: float | str,
) -> reporting.Report:
  """The kNN proxy of every candidate, and few-shot accuracy of the `keep` best by it."""
  if len(k) != 1:
    raise ValueError(f'--k={",".join(map(str, k))} must be one number for rank, the k of its proxy')
  fewshot.check_settings(shots, seeds, l2)
  names = candidate_names(names, train, test)
  if not test:
    raise ValueError('--test is not set; rank measures few-shot accuracy on test files')
  num_kept = number_to_keep(keep, names)
  check_representations(train, test)

  proxy = [_knn_accuracy(source, None, k, metric)[0][k[0]] for source in train]
  order = best_first(proxy)
  kept = order[:num_kept]
  results = {i: _few_shot(train[i], test[i], shots=shots, seeds=seeds, l2=l2) for i in kept}
  # {shots: (proxies, accuracies)}
  points = {n: ([proxy[i] for i in kept], [results[i][n].mean for i in kept]) for n in shots}
  agreements = {}
  notes = []
  if len(kept) < len(names):
    notes = [
      f'few-shot accuracy of the best {len(kept)} of {len(names)}; --keep=all measures the proxy'
    ]
  elif len(names) > 1:
    agreements = {n: rank_agreement(*xy) for n, xy in points.items()}
  notes += [
    f"{reporting.counted(n, 'shot')}: Kendall's tau "
    + ('undefined' if found['kendall_tau'] is None else f'{found["kendall_tau"]:.3f}')
    + f'; regret of keeping the best 1, 2, ...: {", ".join(f"{x:.3f}" for x in found["regret"])}'
    for n, found in agreements.items()
  ]
  proxy_name = f'kNN accuracy, k = {k[0]}'
  return reporting.Report(
    row_title='candidate',
    title='Candidates for a task',
    introduction=f'All candidates by the leave-one-out {proxy_name} ({metric} distance) on the '
    f'training examples, and few-shot accuracy on the test examples of the best {len(kept)}.',
    rows=[
      {
        'name': names[i],
        proxy_name: f'{proxy[i]:.4f}',
        'fewshot': {'': {n: result.mean for n, result in results.get(i, {}).items()}},
        'fewshot_stderr': {'': {n: result.stderr for n, result in results.get(i, {}).items()}},
      }
      for i in order
    ],
    notes=notes,
    draw=lambda: _figure(
      reporting.scatter_png(
        {reporting.counted(n, 'shot'): xy for n, xy in points.items()},
        [names[i] for i in kept],
        xlabel=f'{proxy_name}, leave-one-out',
        ylabel='few-shot accuracy',
      ),
      'Few-shot accuracy against the proxy.',
    ),
    json={
      'metric': metric,
      'k': k[0],
      'rows': [
        {
          'candidate': names[i],
          'proxy': proxy[i],
          'few_shot': {n: result.record() for n, result in results.get(i, {}).items()},
        }
        for i in order
      ],
      'agreement': agreements,
    },
  )


def rankme(
  *, train: Sequence[str], names: Sequence[str] | None, max_examples: int
) -> reporting.Report:
  """RankMe of every candidate, with its spectrum."""
  if max_examples < 1:
    raise ValueError(f'--max_examples={max_examples} must be at least 1')
  names = candidate_names(names, train)
  check_representations(train)
  rows = []
  for name, source in zip(names, train, strict=True):
    features = rows_lib.read(source).features
    sigma = effective_rank.singular_values(features, max_examples)
    rows.append(
      {
        'candidate': name,
        'rankme': effective_rank.rankme(sigma),
        'pre_logits_dim': features.shape[1],
        'num_examples': min(max_examples, len(features)),
        'singular_values': sigma,
      }
    )
  rows.sort(key=lambda row: -row['rankme'])

  def draw():
    spectra = {}
    for row in rows:
      relative = row['singular_values'] / row['singular_values'][0]
      relative = relative[relative > len(relative) * np.finfo(float).eps]  # more than rounding
      spectra[row['candidate']] = np.arange(1, len(relative) + 1), relative
    png = reporting.lines_png(
      spectra, xlabel='k', ylabel='singular value / largest', log_x=True, log_y=True
    )
    return _figure(png, 'Singular values over the largest.')

  return reporting.Report(
    row_title='candidate',
    title='RankMe',
    introduction='Effective rank of the representations: the exponential of the entropy of their '
    'singular values (Garrido et al. 2023, eq. 1).',
    rows=[
      {
        'name': row['candidate'],
        'pre_logits_dim': row['pre_logits_dim'],
        'examples': row['num_examples'],
        'RankMe': row['rankme'],
      }
      for row in rows
    ],
    notes=['from 1 to the smaller of D and the number of examples'],
    draw=draw,
    json={'rows': rows},
  )


def ensemble(
  *,
  validation: Sequence[str],
  test: Sequence[str],
  names: Sequence[str] | None,
  max_members: int,
  replacement: bool,
) -> reporting.Report:
  """A greedy ensemble beside the best single candidate and the average of all."""
  names = candidate_names(names, validation, test, flag='validation')
  # The test files are also read now, so that a wrong one is found before anything is computed.
  labels = []
  meanings = []
  for read in same_predictions(validation):
    labels.append(read.label_log_prob)
    meanings.append(read.meaning)
  for i, of_test in enumerate(same_predictions(test)):
    rows_lib.check_pair((validation[i], test[i]), (meanings[i], of_test.meaning))

  members, path = greedy_ensemble.greedy_ensemble(
    np.stack(labels), max_members=max_members, replacement=replacement
  )
  shares = np.bincount(members, minlength=len(names)) / len(members)
  best = members[0]  # the first step finds the best single candidate
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
    scores = _mixture_scores(sources, np.stack(list(ensembles.values())))
    for row, (nll, accuracy) in zip(rows, scores, strict=True):
      row |= {f'{split}_nll': nll, f'{split}_accuracy': accuracy}
  chosen = sorted(set(members), key=lambda i: -shares[i])
  steps = [
    {'candidate': names[member], 'validation_nll': nll}
    for member, nll in zip(members, path, strict=True)
  ]
  return reporting.Report(
    row_title='candidate',
    title='Greedy ensemble',
    introduction=f'Members out of {reporting.counted(len(names), "candidate")}, added one by one '
    f'for the smallest validation NLL {"with" if replacement else "without"} replacement; an '
    'ensemble predicts the average of probabilities.',
    rows=[
      {'name': row['ensemble'], 'members': row['num_members']}
      | {
        f'{split} {title}': f'{row[f"{split}_{name}"]:.4f}'
        for split in splits
        for title, name in (('NLL', 'nll'), ('accuracy', 'accuracy'))
      }
      for row in rows
    ],
    notes=['members: ' + ', '.join(f'{names[i]} {shares[i]:.3g}' for i in chosen)]
    + [
      f'{i}. {step["candidate"]}: validation NLL {step["validation_nll"]:.4f}'
      for i, step in enumerate(steps, 1)
    ],
    draw=lambda: _figure(
      reporting.lines_png(
        {'validation NLL': (range(1, len(path) + 1), path)},
        xlabel='members',
        ylabel='validation NLL',
        whole_steps=True,
      ),
      'Validation NLL by number of members.',
    ),
    json={
      'rows': rows,
      'members': [{'candidate': names[i], 'weight': shares[i]} for i in chosen],
      'steps': steps,
    },
  )


def _figure(png: bytes, caption: str) -> dict[str, reporting.Figure]:
  return {'plot': reporting.Figure(png, caption)}


def _knn_accuracy(
  train: str, test: str | None, ks: Sequence[int], metric: str
) -> tuple[dict[int, float], int]:
  """({k: accuracy}, D) of a candidate; leaves out each training example if test is None."""
  arrays = [rows_lib.read(source) for source in (train, test) if source]
  arguments = [x for split in arrays for x in (split.features, split.label)]
  accuracy = neighbors.knn_accuracy(*arguments, ks=ks, metric=metric)
  return accuracy, arrays[0].features.shape[1]


def _few_shot(train: str, test: str, **settings) -> dict[int, fewshot.FewShotResult]:
  """{shots: result} of a candidate."""
  fit = rows_lib.read(train)
  new = rows_lib.read(test)
  return fewshot.few_shot(
    fit.features, fit.label, new.features, new.label, train_index=fit.index, **settings
  )


def _mixture_scores(sources: Sequence[str], weights: np.ndarray) -> list[tuple[float, float]]:
  """(NLL, accuracy) of mixtures of the candidates with weights [E, C]."""
  label = read_softmax_predictions(sources[0]).label
  log_probs = greedy_ensemble.mixture_log_prob(
    (read_softmax_predictions(source).log_prob for source in sources), weights
  )
  scores = []
  for log_prob in log_probs:  # [N, K]
    nll = -np.take_along_axis(log_prob, label[:, None], axis=1).mean()
    scores.append((float(nll), float(np.mean(log_prob.argmax(axis=1) == label))))
  return scores
