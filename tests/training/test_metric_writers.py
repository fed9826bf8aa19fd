import contextlib
import resource

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.util import tensor_util

from het_plugin.training import metric_writers
from tests.training.toy_run import lines as rows


def test_a_line_a_write(tmp_path):
  writer = metric_writers.JsonlWriter(tmp_path / 'm.jsonl', resume_step=0)
  writer.write_scalars(1, {'loss': np.float32(0.5), 'tau': 1})
  writer.write_scalars(1, {'eval/loss': float('nan')})
  assert rows(tmp_path / 'm.jsonl') == [
    {'step': 1, 'loss': 0.5, 'tau': 1.0},
    {'step': 1, 'eval/loss': None},
  ]


def test_resuming_drops_the_steps_to_come_and_a_torn_line(tmp_path):
  path = tmp_path / 'm.jsonl'
  path.write_text('{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n{"step": 3, "x": 3}\n{"step": 2, "x')
  writer = metric_writers.JsonlWriter(path, resume_step=2)
  writer.write_scalars(3, {'x': 30})
  assert [(row['step'], row['x']) for row in rows(path)] == [(1, 1), (2, 2), (3, 30)]
  assert [p.name for p in tmp_path.iterdir()] == ['m.jsonl']


def test_damaged_lines_are_left_out_with_a_warning(tmp_path, caplog):
  path = tmp_path / 'm.jsonl'
  path.write_bytes(b'{"step": 1, "x": 1}\n{"st\xff\n{"x": 3}\n{"step": 4, "x": 4}\n')
  metric_writers.JsonlWriter(path, resume_step=4)
  assert [row['step'] for row in rows(path)] == [1, 4]
  (message,) = caplog.messages
  assert message == f'{path}: line 2 and 1 more are damaged and left out.'
  path.unlink()
  metric_writers.JsonlWriter(path, resume_step=4)
  assert caplog.messages[1] == f'{path} is missing: the metrics up to step 4 are lost.'


def test_an_evaluation_that_does_not_count_is_dropped(tmp_path):
  path = tmp_path / 'm.jsonl'
  lines = [
    '{"step": 2, "eval/x": 1}',
    '{"step": 3, "train/x": 2}',
    '{"step": 3, "data/corrupt_records": 1}',
    '{"step": 3, "goodput/share": 0.5}',
    '{"step": 3, "eval/x": 3}',
    '{"step": 3, "train/x": 4, "y": 5}',
  ]
  path.write_text('\n'.join(lines) + '\n')
  metric_writers.JsonlWriter(path, resume_step=3, evaluated=True)
  assert path.read_text().splitlines() == lines
  metric_writers.JsonlWriter(path, resume_step=3, evaluated=False)
  assert path.read_text().splitlines() == lines[:4]


def test_event_files_have_scalars_texts_and_what_else_clu_writes(tmp_path):
  writer = metric_writers.RunWriter(tmp_path, resume_step=0)
  writer.write_scalars(3, {'train/loss': 0.5})
  writer.write_texts(3, {'gin_config': 'x = 1'})
  writer.write_images(3, {'picture': np.zeros((1, 2, 2, 3), np.uint8)})
  writer.close()
  events = event_accumulator.EventAccumulator(
    str(tmp_path), size_guidance={event_accumulator.TENSORS: 0}
  )
  events.Reload()
  (event,) = events.Tensors('train/loss')
  assert (event.step, tensor_util.make_ndarray(event.tensor_proto)) == (3, 0.5)
  (event,) = events.Tensors('gin_config')
  assert tensor_util.make_ndarray(event.tensor_proto).item() == b'x = 1'
  assert 'picture' in events.Tags()['tensors']
  assert rows(tmp_path / 'metrics.jsonl') == [{'step': 3, 'train/loss': 0.5}]


def test_tensorboard_drops_the_steps_that_a_resumed_run_repeats(tmp_path):
  for resume_step, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
    writer = metric_writers.EventWriter(tmp_path, resume_step)
    for step in steps:
      writer.write_scalars(step, {'train/loss': 0.5})
  events = plugin_event_accumulator.EventAccumulator(str(tmp_path))  # with --load_fast=false
  events.Reload()
  assert [event.step for event in events.Tensors('train/loss')] == [1, 2, 3, 4]


@contextlib.contextmanager
def largest_file(num_bytes):
  """What a full disk does, for files larger than this."""
  _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_that_do_not_fit_wait(tmp_path, caplog):
  path = tmp_path / 'm.jsonl'
  writer = metric_writers.JsonlWriter(path, resume_step=0)
  writer.write_scalars(1, {'x': 1})
  with largest_file(path.stat().st_size + 7):
    for step in (2, 3):
      writer.write_scalars(step, {'x': step})
    with pytest.raises(OSError, match='m.jsonl'):
      writer.flush()
    assert [row['step'] for row in rows(path)] == [1]
    assert path.read_text().endswith('}\n')  # no half line
  assert caplog.text.count('wait in memory') == 1
  writer.write_scalars(4, {'x': 4})
  assert [row['step'] for row in rows(path)] == [1, 2, 3, 4]


def test_an_object_is_written_whole_now_and_then(tmp_path, monkeypatch):
  """An object store, played by a folder."""
  monkeypatch.setattr(metric_writers.run_files, 'is_remote', lambda path: True)
  path = tmp_path / 'm.jsonl'
  path.write_text('{"step": 1, "x": 1}\n{"step": 9, "x": 9}\n')
  writer = metric_writers.JsonlWriter(path, resume_step=1)
  writer.write_scalars(2, {'x': 2})
  assert [row['step'] for row in rows(path)] == [1]
  writer.flush()
  assert [row['step'] for row in rows(path)] == [1, 2]
  writer.write_scalars(3, {'x': 3})
  monkeypatch.setattr(metric_writers, '_REMOTE_SECONDS', 0.0)
  writer.write_scalars(4, {'x': 4})
  assert [row['step'] for row in rows(path)] == [1, 2, 3, 4]
