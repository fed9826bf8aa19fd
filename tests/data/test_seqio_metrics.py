"""seqio's evaluator on our tasks, as t5x.eval runs it."""

import numpy as np
import pytest
import seqio

from het_plugin.data import ImageFeatureConverter, seqio_metrics, tasks


def test_precision_counts_any_of_the_labels():
  targets = [np.array(x) for x in ([3, -1], [2, 5], [-1, -1], [0, -1])]
  aux = {'top5': [np.array(x) for x in ([3, 1, 2], [1, 5, 0], [7, 8, 9], [4, 5, 6])]}
  metrics = seqio_metrics.precision(targets, [None] * 4, aux)
  assert metrics == {'precision_at_1': pytest.approx(1 / 3), 'precision_in_5': pytest.approx(2 / 3)}


def test_likelihood_leaves_out_rows_without_a_label():
  targets = [np.array([1]), np.array([-1]), np.array([0])]
  assert seqio_metrics.likelihood(targets, [-1.0, -9.0, -3.0]) == {'nll': pytest.approx(2.0)}


def test_the_evaluator_reads_a_task_whole_and_in_order():
  tasks.get_task('digits')  # registered
  evaluator = seqio.Evaluator(
    'digits',
    ImageFeatureConverter(pack=False),
    eval_split='test[:20]',
    sequence_length={'image': 8, 'label': 1},
    target_field_name='label',
    async_compute_metrics=False,
  )
  seen = []

  def rows(dataset):
    for number, batch in dataset.as_numpy_iterator():
      assert {name: x.shape for name, x in batch.items()} == {
        **{'image': (8, 8, 1), 'label': (1,)},
        **{'index': (), 'mask': ()},
      }
      seen.append(int(batch['index']))
      yield int(number), batch['label']

  def predict_with_aux(dataset):
    predictions = list(rows(dataset))
    right = [np.repeat(label, 5) if i % 2 else np.full(5, 99) for i, label in predictions]
    return predictions, {'top5': right}

  def score(dataset):
    return [(i, -2.0) for i, _ in rows(dataset)]

  metrics, _ = evaluator.evaluate(
    compute_metrics=True, predict_with_aux_fn=predict_with_aux, score_fn=score
  )
  assert metrics.result() == {'digits': {'precision_at_1': 0.5, 'precision_in_5': 0.5, 'nll': 2.0}}
  assert seen == 2 * list(range(20))
