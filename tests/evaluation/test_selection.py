"""Candidates: that they hold the same examples, proxies of them, and ensembles of them."""

import dataclasses
import itertools

import numpy as np
import pytest
from scipy import special

from het_plugin import rows
from het_plugin.evaluation import candidates
from het_plugin.measures import rankme
from het_plugin.measures.greedy_ensemble import greedy_ensemble, greedy_soup, mixture_log_prob
from het_plugin.measures.ranking import best_first, rank_agreement


def test_kendall_tau_and_regret():
  proxy = [0.1, 0.4, 0.3, 0.9]
  accuracy = [0.2, 0.3, 0.6, 0.5]
  pairs = list(itertools.combinations(range(4), 2))
  signs = [np.sign((proxy[i] - proxy[j]) * (accuracy[i] - accuracy[j])) for i, j in pairs]
  found = rank_agreement(proxy, accuracy)
  assert found['kendall_tau'] == pytest.approx(sum(signs) / len(pairs))
  np.testing.assert_allclose(found['regret'], [0.1, 0.1, 0, 0])
  assert best_first([0.5, 0.9, 0.5, 0.7]) == [1, 3, 0, 2]  # equal ones keep their order


@pytest.mark.parametrize('proxy,accuracy', [([0.5], [0.5]), ([1, 1], [0, 1]), ([0, 1], [0.5, 0.5])])
def test_an_undefined_tau_is_none(proxy, accuracy):
  found = rank_agreement(proxy, accuracy)
  assert found['kendall_tau'] is None and np.isfinite(found['regret']).all()


def test_npy_files_keep_their_labels(tmp_path):
  text = 'a.npz,X.npy,Y.npy,b.safetensors,c.npz:train,Z.npy'
  expected = 'a.npz', 'X.npy,Y.npy', 'b.safetensors', 'c.npz:train', 'Z.npy'
  assert candidates.split_sources([text]) == expected
  (run := tmp_path / 'A=1,B=2').mkdir()
  assert candidates.split_sources([f'{run}']) == (f'{run}',)


def test_representations_of_the_same_examples(tmp_path):
  def write(name, *, d=3, index=(4, 2, 8), labels=(1, 0, 1), **provenance):
    features = np.random.default_rng(0).normal(size=(len(index), d))
    labels = np.array(labels, np.int32)[:, None]
    written = rows.Rows({'features': features}, labels, np.array(index), provenance=provenance)
    rows.write(tmp_path / name, written)
    return str(tmp_path / name)

  train = [write('a.npz', layer='x'), write('b.npz', d=5, index=(8, 4, 2), labels=(1, 1, 0))]
  few = dict(index=(1, 2), labels=(0, 1))
  test = [write('at.npz', **few), write('bt.npz', d=5, **few)]
  candidates.check_representations(train, test)  # the order of rows and the width may differ
  for other, words in [
    (dict(index=(4, 2, 9)), r'c.npz .*a.npz .* 3 and 3, .* 2 '),
    (dict(labels=(1, 1, 1)), r'c.npz .*a.npz .*labels'),
  ]:
    with pytest.raises(ValueError, match=words):
      candidates.check_representations([train[0], write('c.npz', **other)])
  for other, words in [
    (dict(d=4), r't.npz .* D 4 .*a.npz D 3'),
    (dict(layer='stem'), r't.npz .* layer stem .*a.npz layer x'),
  ]:
    with pytest.raises(ValueError, match=words):
      candidates.check_representations(train[:1], [write('t.npz', **few, **other)])


def test_classes_may_have_another_order(tmp_path):
  log_prob = np.log([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
  names = ('dog', 'ant', 'cat')
  first = rows.Rows({'log_prob': log_prob}, np.array([[0], [2]]), np.arange(2), class_names=names)
  paths = [str(tmp_path / 'a.npz'), str(tmp_path / 'b.npz')]
  for path, written in zip(paths, (first, first.named(sorted(names))), strict=True):
    rows.write(path, written)
  one, other = candidates.same_predictions(paths)
  np.testing.assert_array_equal(one.log_prob, other.log_prob)
  assert rows.read(paths[1], 'log_prob').label.tolist() == [2, 1]
  for path, classes in zip(paths, (names, tuple(sorted(names))), strict=True):
    read = rows.read(path, 'log_prob')
    x = {'features': np.ones((2, 3), np.float32)}
    rows.write(path, dataclasses.replace(read, columns=x, class_names=classes))
  assert candidates.check_representations(paths, paths[::-1]) == names


def test_predictions_for_the_same_examples(tmp_path):
  def write(name, k=2, index=(0, 1), label=(0, 1), link='softmax'):
    path = str(tmp_path / name)
    log_prob = np.full((2, k), -np.log(k))
    np.savez(path, log_prob=log_prob, label=np.array(label), index=index, link=link)
    return path

  first = write('a.npz')
  swapped = write('b.npz', index=(1, 0), label=(1, 0))
  for read in candidates.same_predictions([first, swapped]):
    assert (read.index.tolist(), read.label.tolist()) == ([0, 1], [0, 1])
  for second, words in [
    (write('c.npz', k=3), 'c.npz .* 3 .*a.npz 2'),
    (write('d.npz', index=(0, 2)), 'd.npz .*a.npz .* 2 and 2, .* 1 '),
    (write('f.npz', link='sigmoid'), "f.npz .*'sigmoid'.*softmax"),
  ]:
    with pytest.raises(ValueError, match=words):
      list(candidates.same_predictions([first, second]))


def make_predictions(num, n=80, k=4, seed=0):
  """log_prob [C, N, K] and label [N]."""
  rng = np.random.default_rng(seed)
  label = rng.integers(0, k, n)
  logits = 2 * rng.normal(size=(num, n, k)) + 1.5 * np.eye(k)[label]
  return special.log_softmax(logits, axis=-1), label


@pytest.mark.parametrize('replacement', [True, False])
def test_each_step_of_an_ensemble_is_the_best_one(replacement):
  log_prob, label = make_predictions(5)
  of_label = log_prob[:, np.arange(len(label)), label]
  found = greedy_ensemble(of_label, max_members=8, replacement=replacement)
  members = []
  expected = []
  for _ in range(8):
    options = [c for c in range(5) if replacement or c not in members]
    nll = [-np.log(np.exp(of_label[[*members, c]]).mean(axis=0)).mean() for c in options]
    if not options or (expected and min(nll) >= expected[-1]):
      break
    members.append(options[int(np.argmin(nll))])
    expected.append(min(nll))
  assert found[0] == members and len(members) > 2
  np.testing.assert_allclose(found[1], expected, rtol=1e-12)
  same = np.repeat(of_label[:1], 3, axis=0)
  assert greedy_ensemble(same, replacement=replacement)[0] == [0]  # no improvement


def test_ensembles_of_probabilities_that_float64_does_not_hold():
  """e^-1000 is 0 in float64. Two candidates, each wrong on its half, are better together."""
  low = -1000.0
  high = -1e-3
  members, nll = greedy_ensemble(
    np.array([[low, low, high, high], [high, high, low, low], [low] * 4])
  )
  assert members == [0, 1]
  np.testing.assert_allclose(nll, [500.0005, np.log(2) + 1e-3])
  never = np.full(3, -np.inf)
  assert greedy_ensemble(np.array([never, [-1.0, -np.inf, -1], [-2.0, -2, -2]]))[0][0] == 2
  assert greedy_ensemble(np.array([never, never])) == ([0], [np.inf])


def test_mixtures_are_averages_of_probabilities():
  log_prob, _ = make_predictions(3)
  weights = np.array([[1, 0, 0], [0.25, 0.5, 0.25], [0, 0.5, 0.5]])
  got = mixture_log_prob(iter(log_prob), weights)
  np.testing.assert_allclose(np.exp(got), np.einsum('ec,cnk->enk', weights, np.exp(log_prob)))
  tiny = mixture_log_prob([np.array([[-900.0]]), np.array([[-np.inf]])], np.array([[0.5, 0.5]]))
  np.testing.assert_allclose(tiny, [[[-900 - np.log(2)]]])


def test_rankme_is_the_formula_of_the_paper_and_small_singular_values_survive():
  rng = np.random.default_rng(0)
  u, _ = np.linalg.qr(rng.normal(size=(200, 3)))
  v, _ = np.linalg.qr(rng.normal(size=(3, 3)))
  spectrum = np.array([1.0, 1e-4, 1e-11])  # the square of 1e-11 is below a Gram matrix's rounding
  sigma = rankme.singular_values(u * spectrum @ v.T)
  np.testing.assert_allclose(sigma, spectrum, rtol=1e-4)
  p = spectrum / spectrum.sum() + 1e-7
  assert rankme.rankme(sigma) == pytest.approx(np.prod(p**-p))
  with pytest.raises(ValueError, match='4 rows .*zero'):
    rankme.singular_values(np.zeros((4, 3)))


def test_rankme_of_more_examples_than_the_bound_is_a_fixed_choice():
  features = np.random.default_rng(0).normal(size=(500, 4))
  few = rankme.singular_values(features, max_examples=100)
  np.testing.assert_array_equal(few, rankme.singular_values(features, max_examples=100))
  whole = rankme.singular_values(features)
  assert 0.1 < np.square(few).sum() / np.square(whole).sum() < 0.3  # a fifth of the rows


def test_a_greedy_soup_keeps_what_does_not_harm():
  tried = []

  def try_with(members):
    tried.append(members)
    return {(2, 0): 0.7, (2, 0, 1): 0.6}[tuple(members)]

  alone = [(0.6, 1.0), (0.6, 1.5), (0.7, 2.0)]
  alone = [{'precision_at_1': accuracy, 'nll': nll} for accuracy, nll in alone]
  assert greedy_soup(alone, try_with) == [2, 0]
  assert tried == [[2, 0], [2, 0, 1]]
  worse = alone[2] | {'nll': 3.0}  # the best single candidate is the first member
  assert greedy_soup([worse, alone[2]], lambda members: 0.0) == [1]
