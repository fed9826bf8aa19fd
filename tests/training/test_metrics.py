import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu_metrics

from het_plugin.training import metrics as metrics_lib

PARAMS = {
  'backbone': {'block_0': {'kernel': jnp.full((2, 2), 1.0)}, 'norm': jnp.full((5,), 1.0)},
  'head': {'kernel': jnp.full((4,), 2.0), 'covariance': {'J': jnp.full((9,), 1.0)}},
}


def metrics(loss: float, rows: int = 1):
  norms = {'gradient_norm': jnp.float32(loss)}
  return {
    'loss': clu_metrics.Average(total=jnp.float32(loss * rows), count=jnp.int32(rows)),
    'update': metrics_lib.UpdateReport.from_norms(norms, jnp.isfinite(loss)),
  }


def make_stats(
  period: int,
  batch_size: int = 1,
  flops_per_step: float = 1.0,
  on_step=lambda *_: None,
  open_period=None,
):
  mesh = jax.make_mesh((8,), ('data',))
  return metrics_lib.StepMetrics(period, batch_size, flops_per_step, mesh, on_step, open_period)


def test_summaries_come_at_multiples_of_the_period_and_weigh_by_rows():
  stats = make_stats(period=2, batch_size=4)
  assert stats.add(5, metrics(7.0), data_wait=0.0) == []  # Resumed at step 4.
  (summary,) = stats.add(6, metrics(1.0, rows=2), data_wait=0.0)
  assert summary.step == 6
  assert summary.values['loss'] == pytest.approx((7 + 2 * 1) / 3)
  assert stats.close(6) == []
  stats.add(7, metrics(5.0), data_wait=0.0)
  (summary,) = stats.drain() + stats.close(7)
  assert (summary.step, summary.values['loss']) == (7, 5.0)


def test_steps_that_are_not_finite_are_left_out_and_counted():
  seen = []
  stats = make_stats(
    2, on_step=lambda step, values: seen.append((step, float(values['loss'].total)))
  )
  stats.add(1, metrics(math.nan), data_wait=0.0)
  (summary,) = stats.add(2, metrics(3.0), data_wait=0.0)
  assert (summary.values['loss'], summary.values['nonfinite_steps']) == (3.0, 1.0)
  stats.add(3, metrics(math.inf), data_wait=0.0)
  (summary,) = stats.add(4, metrics(math.inf), data_wait=0.0)
  assert math.isnan(summary.values['loss']) and math.isnan(summary.values['gradient_norm'])
  assert summary.values['nonfinite_steps'] == 2.0
  (summary,) = stats.add(5, metrics(1.0), data_wait=0.0) + stats.close(5)
  assert (summary.values['loss'], summary.values['nonfinite_steps']) == (1.0, 0.0)
  np.testing.assert_equal(seen, [(1, np.nan), (2, 3), (3, np.inf), (4, np.inf), (5, 1)])


def through_json(stats):
  return json.loads(json.dumps(stats.open_period()))


def test_a_resumed_period_has_the_steps_before_the_interruption(caplog):
  losses = [0.1, math.nan, 1 / 3, 0.7]
  whole = make_stats(period=4)
  stats = make_stats(period=4)
  assert stats.open_period() is None
  for step, loss in enumerate(losses, 1):
    wanted = whole.add(step, metrics(loss, rows=3), data_wait=0.0)
    stats = make_stats(period=4, open_period=through_json(stats))
    summaries = stats.add(step, metrics(loss, rows=3), data_wait=0.5)
  assert (summaries[0].step, stats.open_period()) == (4, None)
  for name in ('loss', 'gradient_norm', 'nonfinite_steps'):
    assert summaries[0].values[name] == wanted[0].values[name]
  seconds = 4 * summaries[0].values['timing/ms_per_step'] / 1e3
  assert summaries[0].values['timing/data_wait_share'] == pytest.approx(4 * 0.5 / seconds)

  stats.add(5, metrics(3.0), data_wait=0.0)
  others = metrics(1.0) | {'nll': clu_metrics.Average(jnp.float32(1), jnp.int32(1))}
  resumed = make_stats(period=2, open_period=through_json(stats))
  (summary,) = resumed.add(6, others, data_wait=0.0)
  assert summary.values['loss'] == 1.0 and 'metrics' in caplog.text


def test_speed_leaves_pauses_out_and_shows_the_wait_for_data(monkeypatch):
  assert 'timing/mfu' not in make_stats(1).add(1, metrics(1.0), 0.0)[0].values  # of a CPU
  monkeypatch.setattr(metrics_lib.flops_lib, 'peak_flops', lambda kind: 1e3)
  now = 0.0
  monkeypatch.setattr(metrics_lib, 'time', types.SimpleNamespace(monotonic=lambda: now))
  stats = make_stats(period=2, batch_size=10, flops_per_step=8e2)  # 100 ms at peak
  now += 0.1
  stats.add(1, metrics(1.0), data_wait=0.1)
  with stats.paused():
    now += 0.5
  now += 0.3
  (summary,) = stats.add(2, metrics(1.0), data_wait=0.0)
  values = {name: summary.values[f'timing/{name}'] for name in ('ms_per_step', 'mfu')}
  assert values == pytest.approx({'ms_per_step': 200, 'mfu': 0.5})
  assert summary.values['timing/examples_per_second'] == pytest.approx(50)
  assert summary.values['timing/data_wait_share'] == pytest.approx(0.25)


def test_groups_are_the_top_level_and_the_parts_of_the_head():
  assert metrics_lib.norms('param_norm', PARAMS, metrics_lib.GROUPS) == {
    'param_norm': pytest.approx(np.sqrt(9 + 16 + 9)),
    'param_norm/backbone': 3,
    'param_norm/head': 5,
    'param_norm/head/kernel': 4,
    'param_norm/head/covariance': 3,
  }


def test_other_groups():
  norms = metrics_lib.norms('x', PARAMS, [r'backbone/block_\d+', 'encoder'])
  assert set(norms) == {'x', 'x/backbone/block_0'}
