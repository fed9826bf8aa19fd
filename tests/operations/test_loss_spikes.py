import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from het_plugin.operations import loss_spikes
from het_plugin.operations.loss_spikes import LossSpikes

STEPS = 1000
# Losses of runs in which nothing goes wrong, by (step [STEPS], random generator).
CALM = {
  'constant': lambda t, rng: np.full(STEPS, 2.0),
  'rounding': lambda t, rng: 2.0 + 1e-7 * rng.normal(size=STEPS),
  'noisy': lambda t, rng: 2.0 + 0.1 * rng.normal(size=STEPS),
  'decreasing': lambda t, rng: 10 * np.exp(-t / 200) + 0.1,
  'decreasing and noisy': lambda t, rng: 10 * np.exp(-t / 200) + 1 + 0.2 * rng.normal(size=STEPS),
  'skewed': lambda t, rng: rng.gamma(16, 0.1, size=STEPS),
  'negative': lambda t, rng: -5 - t / 250 + 0.1 * rng.normal(size=STEPS),
  'slowly rising': lambda t, rng: 2 + t / STEPS + 0.02 * rng.normal(size=STEPS),
}


@pytest.fixture(scope='module')
def spikes(tmp_path_factory):
  """(cfg, losses) -> {step: spike}, steps counted from 1."""

  def find(cfg, losses):
    report = loss_spikes.SpikeReport(cfg, tmp_path_factory.mktemp('spikes') / 'x.jsonl', 0)
    for step, loss in enumerate(losses, 1):
      report.add(step, loss, dict)
    return {row['step']: row for row in loss_spikes.run_files.read_lines(report._path)}

  return find


@pytest.mark.parametrize('kind', CALM)
@hypothesis.settings(max_examples=2, deadline=None, derandomize=True)
@hypothesis.given(seed=strategies.integers(0, 2**32 - 1))
def test_calm_losses_raise_no_alarm_and_a_spike_among_them_does(spikes, kind, seed):
  rng = np.random.default_rng(seed)
  losses = CALM[kind](np.arange(STEPS), rng)
  assert not spikes(LossSpikes(), losses)
  step = int(rng.integers(300, STEPS))
  losses[step - 1] += 0.2 * abs(losses[step - 1]) + 12 * np.std(losses[step - 200 : step])
  assert list(spikes(LossSpikes(), losses)) == [step]


def test_the_threshold_is_that_of_the_window(spikes):
  losses = [100.0, 100.0, 1.0, 2.0, 3.0, 4.0, 5.0]
  cfg = LossSpikes(window=5, min_history=5, threshold=2.0, min_rise=0.1)
  edge = 3 + 2 * 1.4826 * 1  # median 3, deviations 2 1 0 1 2
  assert spikes(cfg, [*losses, edge - 0.01]) == {}
  assert spikes(cfg, [*losses, edge + 0.01])[8]['threshold'] == pytest.approx(edge)


def test_small_rises_of_a_steady_loss_do_not_count(spikes):
  assert spikes(LossSpikes(), [1.0] * 60 + [1.04]) == {}
  assert list(spikes(LossSpikes(), [1.0] * 60 + [1.06])) == [61]
  assert spikes(LossSpikes(), [1.0] * 49 + [9.0]) == {}  # Too short a history.


@pytest.mark.parametrize('is_remote', [False, True])
def test_a_line_a_spike_but_not_too_many(tmp_path, caplog, monkeypatch, is_remote):
  """In an object store, played by a folder, too."""
  monkeypatch.setattr(loss_spikes.run_files, 'is_remote', lambda path: is_remote)
  path = tmp_path / 'spikes.jsonl'
  cfg = LossSpikes(window=20, min_history=10, min_period=5)
  report = loss_spikes.SpikeReport(cfg, path, resume_step=0)
  for step in range(1, 41):
    report.add(step, 50.0 if step in (20, 24, 25, 40) else 1.0, lambda: {'index': [7]})
  assert [json.loads(line) for line in path.read_text().splitlines()] == [
    {'step': step, 'loss': 50.0, 'median': 1.0, 'threshold': 1.05, 'index': [7]}
    for step in (20, 25, 40)
  ]
  assert caplog.text.count('Loss spike: 50 at step') == 3
  loss_spikes.SpikeReport(cfg, path, resume_step=25)
  assert [json.loads(line)['step'] for line in path.read_text().splitlines()] == [20, 25]


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'window': 10}, 'min_history=50 must be at least 1 and at most LossSpikes.window=10'),
    ({'threshold': 0}, 'threshold=0 must be positive'),
  ],
)
def test_bad_settings_are_named(settings, words):
  with pytest.raises(ValueError, match=words):
    LossSpikes(**settings)
