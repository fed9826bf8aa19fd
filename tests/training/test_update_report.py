import jax
import jax.numpy as jnp
import numpy as np
import pytest

from het_plugin.training import step_metrics, trainer, update_report

PARAMS = {
  'backbone': {'block_0': {'kernel': jnp.full((2, 2), 1.0)}, 'norm': jnp.full((5,), 1.0)},
  'head': {'kernel': jnp.full((4,), 2.0), 'covariance': {'J': jnp.full((9,), 1.0)}},
}


def test_groups_are_the_top_level_and_the_parts_of_the_head():
  assert update_report.norms('param_norm', PARAMS, update_report.GROUPS) == {
    'param_norm': pytest.approx(np.sqrt(9 + 16 + 9)),
    'param_norm/backbone': 3,
    'param_norm/head': 5,
    'param_norm/head/kernel': 4,
    'param_norm/head/covariance': 3,
  }


def test_other_groups():
  norms = update_report.norms('x', PARAMS, [r'backbone/block_\d+', 'encoder'])
  assert set(norms) == {'x', 'x/backbone/block_0'}
  with pytest.raises(ValueError, match=r"norm_groups has '\(head'"):
    trainer.Trainer(None, None, None, None, norm_groups=['(head'])


def test_norms_are_averaged_over_steps():
  def report(a, b, finite=True):
    norms = {'a': jnp.float32(a), 'b': jnp.float32(b)}
    return {'update': update_report.UpdateReport.from_norms(norms, jnp.asarray(finite))}

  merged = trainer.merge_metrics(jax.device_get(report(1, 10)), jax.device_get(report(3, 20)))
  assert step_metrics.compute_metrics(merged) == {'a': 2.0, 'b': 15.0}
  assert trainer.is_finite(merged)
  assert not trainer.is_finite(trainer.merge_metrics(merged, report(0, 0, finite=False)))
