import json

import numpy as np
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util import tensor_util

from het_plugin.training import metric_writers


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_a_write(tmp_path):
  writer = metric_writers.JsonlWriter(tmp_path / 'm.jsonl', resume_step=0)
  writer.write_scalars(1, {'loss': np.float32(0.5), 'tau': 1})
  writer.write_scalars(1, {'eval/loss': float('nan')})
  writer.write_texts(1, {'config': 'not a scalar'})
  writer.close()
  assert rows(tmp_path / 'm.jsonl') == [
    {'step': 1, 'loss': 0.5, 'tau': 1.0},
    {'step': 1, 'eval/loss': None},
  ]


def test_resuming_drops_the_steps_to_come_and_a_torn_line(tmp_path):
  path = tmp_path / 'm.jsonl'
  path.write_text('{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n{"step": 3, "x": 3}\n{"step": 2, "x')
  writer = metric_writers.JsonlWriter(path, resume_step=2)
  writer.write_scalars(3, {'x': 30})
  writer.close()
  assert [(row['step'], row['x']) for row in rows(path)] == [(1, 1), (2, 2), (3, 30)]
  assert [p.name for p in tmp_path.iterdir()] == ['m.jsonl']


def test_event_files_too(tmp_path):
  writer = metric_writers.create_writer(tmp_path, resume_step=0)
  writer.write_scalars(3, {'train/loss': 0.5})
  writer.close()
  events = event_accumulator.EventAccumulator(
    str(tmp_path), size_guidance={event_accumulator.TENSORS: 0}
  )
  events.Reload()
  (event,) = events.Tensors('train/loss')
  assert (event.step, tensor_util.make_ndarray(event.tensor_proto)) == (3, 0.5)
  assert rows(tmp_path / 'metrics.jsonl') == [{'step': 3, 'train/loss': 0.5}]
