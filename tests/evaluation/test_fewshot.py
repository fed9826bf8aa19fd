"""The few-shot protocol: draws, choice of l2, edge cases, and accuracy on real digits."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from het_plugin.evaluation import fewshot, ridge


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


def test_single_seed_has_no_standard_error(digits):
  assert fewshot.few_shot(*digits, shots=(5,), seeds=(4,))[5].stderr is None


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


def test_draw_differs_by_seed_and_class_and_covers_the_class():
  labels = np.repeat([3, 8], 20)
  index = np.tile(np.arange(20), 2)
  first, second = fewshot.draw_order(labels, index, seed=0)
  assert sorted(first) == list(range(20)) and sorted(second) == list(range(20, 40))
  assert list(first) != list(second - 20)
  assert list(first) != list(fewshot.draw_order(labels, index, seed=1)[0])
  # The draw of a class is not moved by what other classes there are.
  np.testing.assert_array_equal(fewshot.draw_order(labels[20:], index[20:], 0)[0] + 20, second)


def test_draw_is_the_documented_one():
  labels, index = np.array([5, 5, 5, 5]), np.array([40, 10, 30, 20])
  raw = np.random.PCG64(np.random.SeedSequence([7, 5])).random_raw(4)
  (rows,) = fewshot.draw_order(labels, index, seed=7)
  assert list(index[rows]) == [i for _, i in sorted(zip(raw, [10, 20, 30, 40], strict=True))]
  assert list(index[rows]) == [10, 40, 30, 20]  # frozen: a change would move published numbers


def test_leave_one_out_choice_matches_brute_force(digits):
  x, y = digits[0][:60], digits[1][:60]
  model = ridge.decompose(x, y)
  grid = (2.0**-10, 2.0**3, 2.0**8, 2.0**19)
  z = (x - model.mean) / model.scale
  a = np.concatenate([z, np.full((60, 1), 100.0)], axis=1)
  targets = 2 * np.eye(10)[y] - 1
  correct = {}
  for l2 in grid:
    hits = 0
    for i in range(60):
      rest = np.arange(60) != i
      gram = a[rest].T @ a[rest] + l2 * np.eye(a.shape[1])
      hits += int(np.argmax(a[i] @ np.linalg.solve(gram, a[rest].T @ targets[rest])) == y[i])
    correct[l2] = hits
  assert len(set(correct.values())) > 1
  assert fewshot.leave_one_out_l2(model, grid) == max(grid, key=lambda l2: (correct[l2], l2))


def test_bounded_leave_one_out_chooses_as_good_an_l2(digits, monkeypatch):
  model = ridge.decompose(digits[0], digits[1])
  every_row = np.arange(len(digits[1]))

  def accuracy(l2):
    return np.mean(model.leave_one_out(l2, every_row).argmax(axis=1) == model.label_ids)

  best = accuracy(fewshot.leave_one_out_l2(model))
  assert best == max(accuracy(l2) for l2 in fewshot.L2_GRID)
  monkeypatch.setattr(fewshot, 'MAX_LEFT_OUT', 400)  # of 1,198
  assert accuracy(fewshot.leave_one_out_l2(model)) > best - 0.01


def test_equal_leave_one_out_accuracy_takes_the_larger_l2():
  x = np.array([[-1.0], [-1.1], [1.0], [1.1]])  # separable at any of these
  model = ridge.decompose(x, np.array([0, 0, 1, 1]))
  assert fewshot.leave_one_out_l2(model, (0.01, 0.1, 0.02)) == 0.1


def test_test_split_never_chooses_l2(digits):
  train_x, train_y, test_x, test_y = digits
  one = fewshot.few_shot(train_x, train_y, test_x, test_y, shots=(5,))
  other = fewshot.few_shot(train_x, train_y, test_x[::-1] * 9, (test_y + 1) % 10, shots=(5,))
  assert one[5].l2 == other[5].l2 and one[5].accuracies != other[5].accuracies


def test_one_shot_uses_the_fixed_strength_and_a_number_is_kept(digits):
  assert fewshot.few_shot(*digits, shots=(1,), seeds=(0, 1))[1].l2 == (2.0**10, 2.0**10)
  assert fewshot.few_shot(*digits, shots=(5,), seeds=(0,), l2=3)[5].l2 == (3.0,)


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


@pytest.mark.parametrize('l2', ['loo', 2.0**-10])
@pytest.mark.parametrize('n,d', [(1, 1), (1, 4), (2, 3), (3, 200)])
def test_extremes_are_finite(n, d, l2):
  rng = np.random.default_rng(0)
  train_x = rng.normal(size=(n, d)).astype(np.float32)
  results = fewshot.few_shot(
    train_x, np.arange(n) // 2, rng.normal(size=(5, d)), np.zeros(5, np.int32), shots=(1, 25), l2=l2
  )
  for result in results.values():
    assert np.isfinite(result.accuracies).all() and np.isfinite(result.l2).all()
  if n == 1:
    assert results[1].accuracies == (1.0,) * 3


@pytest.mark.parametrize(
  'change,message',
  [
    (dict(train_x=np.zeros((3, 2, 1))), r'train_x must be \[N, D\]'),
    (dict(train_y=np.zeros(4, int)), r'\[3, 2\] and \[4\]'),
    (dict(test_x=np.zeros((2, 5))), 'train_x has 2 features and test_x 5'),
    (dict(test_x=np.zeros((0, 2)), test_y=np.zeros(0, int)), 'test_x is empty'),
    (dict(train_y=np.array([0, 1, -1])), 'labels >= 0'),
    (dict(train_y=np.zeros(3)), 'integer labels'),
    (dict(train_x=np.array([[0, np.nan], [0, 0], [np.inf, 0]])), '2 rows that are not finite'),
    (dict(train_index=np.array([0, 1, 1])), '3 distinct example ids'),
    (dict(shots=(0, 5)), r'shots=\(0, 5\)'),
    (dict(shots=()), 'shots='),
    (dict(seeds=(-1,)), r'seeds=\(-1,\)'),
    (dict(l2=0.0), r'l2=0\.0'),
    (dict(l2=float('nan')), 'l2=nan'),
    (dict(l2='best'), "l2='best' must be 'loo'"),
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
