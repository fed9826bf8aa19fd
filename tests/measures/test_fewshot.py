"""The few-shot protocol: draws, choice of l2, edge cases, and accuracy on real digits."""

import numpy as np
import pytest
from scipy.stats import rankdata
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from het_plugin.measures import fewshot, ridge


@pytest.fixture(scope='module')
def digits():
  data = load_digits()
  test = np.arange(len(data.target)) % 3 == 0
  return data.data[~test], data.target[~test], data.data[test], data.target[test]


def test_digits_pixels(digits):
  results = fewshot.few_shot(*digits)
  assert list(results) == [1, 5, 10, 25]
  means = [result.mean for result in results.values()]
  assert means == sorted(means)
  assert means[0] > 0.3 and means[-1] >= 0.85
  for result in results.values():
    assert len(result.accuracies) == len(result.l2) == 3
    assert result.classes_short == result.test_unseen == 0
    expected = np.std(result.accuracies, ddof=1) / np.sqrt(3)
    assert result.stderr == pytest.approx(expected)


def test_draw_depends_on_ids_and_not_on_row_order(digits):
  train_x, train_y, test_x, test_y = digits
  ids = np.random.default_rng(0).permutation(10_000)[: len(train_y)]
  shuffle = np.random.default_rng(1).permutation(len(train_y))
  kwargs = dict(shots=(1, 5), seeds=(0, 1))
  one = fewshot.few_shot(train_x, train_y, test_x, test_y, train_index=ids, **kwargs)
  other = fewshot.few_shot(
    train_x[shuffle], train_y[shuffle], test_x, test_y, train_index=ids[shuffle], **kwargs
  )
  assert one == other


def test_draw_is_the_documented_one():
  labels = np.array([5, 5, 5, 5])
  index = np.array([40, 10, 30, 20])
  raw = np.random.PCG64(np.random.SeedSequence([7, 5])).random_raw(4)
  (rows,) = fewshot.draw_order(labels, index, seed=7)
  assert list(index[rows]) == [i for _, i in sorted(zip(raw, [10, 20, 30, 40], strict=True))]
  assert list(index[rows]) == [10, 40, 30, 20]  # frozen: a change would move published numbers


def test_equal_leave_one_out_accuracy_takes_the_larger_l2():
  x = np.array([[-1.0], [-1.1], [1.0], [1.1]])  # separable at any of these
  y = np.array([0, 0, 1, 1])
  assert fewshot.leave_one_out_l2(ridge.decompose(x, y), x, y, (0.01, 0.1, 0.02)) == 0.1


def test_test_split_never_chooses_l2(digits):
  train_x, train_y, test_x, test_y = digits
  one = fewshot.few_shot(train_x, train_y, test_x, test_y, shots=(5,))
  other = fewshot.few_shot(train_x, train_y, test_x[::-1] * 9, (test_y + 1) % 10, shots=(5,))
  assert one[5].l2 == other[5].l2 and one[5].accuracies != other[5].accuracies


def test_short_classes_are_used_and_counted_and_unseen_labels_are_wrong():
  rng = np.random.default_rng(0)
  train_y = np.array([0] * 6 + [2] * 2 + [9])
  train_x = np.eye(10)[train_y] + 0.01 * rng.normal(size=(9, 10))
  test_y = np.array([0, 2, 9, 5])  # 5 is nowhere in the training split
  test_x = np.eye(10)[test_y]
  results = fewshot.few_shot(train_x, train_y, test_x, test_y, shots=(1, 2, 5), l2=0.1)
  assert [result.classes_short for result in results.values()] == [0, 1, 2]
  for result in results.values():
    assert result.test_unseen == 1
    assert max(result.accuracies) <= 0.75
  assert results[5].accuracies == (0.75,) * 3
  # All subsets would be the same: one draw, which has no error.
  data = {'a': (fewshot.Split(train_x, train_y), fewshot.Split(test_x, test_y))}
  ranked = fewshot.few_shot_all(data, fewshot.Protocol(l2='mean_rank'), shots=(6,))['a'][6]
  assert len(ranked.l2) == 1
  everything = fewshot.few_shot(train_x, train_y, test_x, test_y, shots=(6, 9), l2='heldout')
  assert [(len(x.l2), x.stderr) for x in everything.values()] == [(1, None)] * 2


@pytest.mark.parametrize(
  'change,message',
  [
    (dict(train_x=np.array([[0, np.nan], [0, 0], [np.inf, 0]])), '2 rows that are not finite'),
    (dict(train_index=np.array([0, 1, 1])), '3 distinct example ids'),
    (dict(shots=(0, 5)), r'shots=\(0, 5\)'),
    (dict(seeds=(1, 1)), r'seeds=\(1, 1\) must be one or more distinct numbers'),
    (dict(l2='mean_rank'), 'call few_shot_all'),
    (dict(classifier='svm'), "classifier='svm' must be one of 'ridge', 'logistic'"),
    (dict(classifier='logistic'), "l2='loo' needs classifier='ridge'"),
  ],
)
def test_bad_input_is_one_sentence(change, message):
  args = dict(
    train_x=np.arange(6.0).reshape(3, 2),
    train_y=np.array([0, 1, 1]),
    test_x=np.zeros((2, 2)),
    test_y=np.array([0, 1]),
  )
  with pytest.raises(ValueError, match=message):
    fewshot.few_shot(**(args | change))


def test_held_out_rows_are_those_drawn_next(digits):
  train_x, train_y, test_x, test_y = digits
  results = fewshot.few_shot(*digits, shots=(5,), seeds=(2,), l2='heldout')
  drawn = fewshot.draw_order(train_y, np.arange(len(train_y)), 2)
  subset, held_out = (np.concatenate([r[a:b] for r in drawn]) for a, b in ((0, 5), (5, 10)))
  model = ridge.decompose(train_x[subset], train_y[subset])
  hits = {
    l2: (model.scores(train_x[held_out], l2).argmax(1) == train_y[held_out]).sum()
    for l2 in fewshot.L2_GRID
  }
  expected = max(hits, key=lambda l2: (hits[l2], l2))
  assert results[5].l2 == (expected,)
  none_left = fewshot.few_shot(train_x, train_y, test_x, test_y, shots=(9999,), l2='heldout')
  assert none_left[9999].l2 == (2.0**10,)


def test_the_first_of_each_class_by_id(digits):
  train_x, train_y, test_x, test_y = digits
  shuffle = np.random.default_rng(1).permutation(len(train_y))
  results = [
    fewshot.few_shot(
      train_x[rows], train_y[rows], test_x, test_y, train_index=rows, shots=(3,), draw='first'
    )
    for rows in (np.arange(len(train_y)), shuffle)
  ]
  assert results[0] == results[1]
  first = np.concatenate([np.flatnonzero(train_y == c)[:3] for c in range(10)])
  model = ridge.decompose(train_x[first], train_y[first])
  (l2,) = results[0][3].l2  # one draw, whatever the seeds
  accuracy = np.mean(model.scores(test_x, l2).argmax(1) == test_y)
  assert results[0][3].accuracies == (accuracy,) and results[0][3].stderr is None


def test_logistic_regression_is_scikit_learns(digits):
  train_x, train_y, test_x, test_y = digits
  result = fewshot.few_shot(
    *digits, shots=(4,), seeds=(0,), l2=8.0, classifier='logistic', draw='first'
  )[4]
  rows = np.concatenate([np.flatnonzero(train_y == c)[:4] for c in range(10)])
  mean = train_x[rows].mean(0)
  std = train_x[rows].std(0)
  z, new = (np.where(std > 0, (x - mean) / (std + 1e-5), 0) for x in (train_x[rows], test_x))
  reference = LogisticRegression(C=1 / 8, max_iter=150).fit(z, train_y[rows])
  assert result.accuracies == (reference.score(new, test_y),)


@pytest.mark.parametrize('classes', [[4], [2, 7]])
def test_logistic_regression_of_few_classes(classes):
  """9 never has an example: its rows are wrong."""
  rng = np.random.default_rng(0)
  train_y = np.repeat(classes, 6)
  train_x = np.eye(10)[train_y] * 3 + 0.1 * rng.normal(size=(len(train_y), 10))
  test_y = np.array([*classes, 9])
  test_x = np.eye(10)[test_y] * 3
  settings = dict(shots=(6,), seeds=(0,), l2=0.1, classifier='logistic')
  result = fewshot.few_shot(train_x, train_y, test_x, test_y, **settings)[6]
  assert result.accuracies == (pytest.approx(len(classes) / (len(classes) + 1)),)
  assert result.test_unseen == 1


def as_datasets(digits, num=3):
  train_x, train_y, test_x, test_y = digits
  rng = np.random.default_rng(0)
  noisy = [train_x + s * rng.normal(size=train_x.shape) for s in range(0, 9 * num, 9)]
  return {
    f'set{i}': (fewshot.Split(x, train_y), fewshot.Split(test_x, test_y))
    for i, x in enumerate(noisy)
  }


def test_mean_rank_takes_one_strength_for_all_data_sets(digits):
  datasets = as_datasets(digits)
  settings = dict(shots=(2,), seeds=(0, 1))
  results = fewshot.few_shot_all(datasets, fewshot.PROTOCOLS['vmoe'], **settings)
  fixed = [
    fewshot.few_shot_all(datasets, fewshot.Protocol(l2=l2), **settings) for l2 in fewshot.L2_GRID
  ]
  (chosen,) = {l2 for name in datasets for l2 in results[name][2].l2}
  position = fewshot.L2_GRID.index(chosen)
  accuracies = np.array(
    [[by_l2[name][2].accuracies for name in datasets] for by_l2 in fixed]
  )  # [L, sets, draws]
  ranks = rankdata(accuracies.reshape(len(fixed), -1), axis=0).mean(axis=1)
  assert ranks[position] == ranks.max()
  for i, name in enumerate(datasets):
    assert results[name][2].accuracies == tuple(accuracies[position, i])


def test_mean_rank_of_others_leaves_the_data_set_out(digits):
  datasets = as_datasets(digits)
  settings = dict(shots=(5,), seeds=(0, 1))
  protocol = fewshot.Protocol(l2='mean_rank_others')
  before = fewshot.few_shot_all(datasets, protocol, **settings)
  train, test = datasets['set0']
  wrong = {**datasets, 'set0': (train, fewshot.Split(test.x, (test.y + 1) % 10))}
  after = fewshot.few_shot_all(wrong, protocol, **settings)
  assert after['set0'][5].l2 == before['set0'][5].l2  # its own test labels do not matter
  assert after['set0'][5].accuracies != before['set0'][5].accuracies
  with pytest.raises(ValueError, match='there is only one'):
    fewshot.few_shot_all({'a': datasets['set0']}, protocol, **settings)


def test_equal_accuracies_do_not_favour_the_larger_strength():
  flat = np.array([0.2, 0.9, 0.9, 0.9, 0.1])
  chosen = fewshot.mean_rank({('a', 0): flat, ('b', 0): flat}, others=False)
  assert chosen == {('a', 0): 2, ('b', 0): 2}
  assert np.argsort(np.argsort(flat)).argmax() == 3  # by position, as theirs
  # One data set decides and the other is all ties, which by position would outvote it.
  picky = np.array([0.1, 0.8, 0.7, 0.75])
  ties = np.full(4, 0.5)
  assert (np.argsort(np.argsort(picky)) + np.argsort(np.argsort(ties))).argmax() == 3
  assert fewshot.mean_rank({('a', 0): picky, ('b', 0): ties}, others=False)['a', 0] == 1
