"""The bar follows what the run writes."""

import time

from het_plugin import reporting
from het_plugin.experiments import training_bar


class Bar:
  def __init__(self, title, total, done, unit):
    self.title, self.total, self.count, self.notes = title, total, done, []

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.over = True

  def update(self, number, note):
    self.count += number
    self.notes.append(note)


def test_it_goes_on_from_the_last_step_and_shows_the_loss(tmp_path, monkeypatch):
  bars = []
  monkeypatch.setattr(
    reporting, 'Progress', lambda *args, **kw: bars.append(Bar(*args, **kw)) or bars[-1]
  )
  monkeypatch.setattr(training_bar, '_SECONDS', 0.001)
  metrics = tmp_path / 'metrics.jsonl'
  metrics.write_text('{"step": 10, "train/loss": 3.0}\n{"step": 10, "fewshot/x": 0.5}\n')
  with training_bar.shown('DET', tmp_path, steps=40, batch_size=8):
    (bar,) = bars
    assert (bar.title, bar.total, bar.count) == ('DET', 320, 80)
    with metrics.open('a') as file:
      file.write('{"step": 20, "train/loss": 2.5}\n{"step": 30, "train/lo')  # half a line
    deadline = time.monotonic() + 20
    while bar.count == 80 and time.monotonic() < deadline:
      time.sleep(0.001)
  assert bar.count == 160 and bar.notes == ['loss 2.500'] and bar.over
