"""Where metrics go: the console, TensorBoard event files and metrics.jsonl."""

import json
import math
import os
from collections.abc import Mapping

import jax
import numpy as np
from clu import metric_writers
from etils import epath


class JsonlWriter(metric_writers.MetricWriter):
  """Appends scalars to a file, one JSON object with its step a line; drops other kinds of values.

  Non-finite values are written as null, which JSON has, unlike NaN.
  """

  def __init__(self, path: epath.PathLike, resume_step: int):
    """Opens the file.

    Args:
      path: created when missing.
      resume_step: lines of later steps are dropped, for the run goes through these steps again; so
        is a last line that a crash cut short.
    """
    path = epath.Path(path)
    if path.exists():
      kept = [line for line in path.read_text().splitlines() if _step_of(line) <= resume_step]
      temporary = path.with_name(path.name + '.tmp')
      temporary.write_text(''.join(line + '\n' for line in kept))
      temporary.replace(path)
    self._file = path.open('a')

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    values = {name: float(value) for name, value in scalars.items()}
    row = {'step': int(step), **{k: v if math.isfinite(v) else None for k, v in values.items()}}
    self._file.write(json.dumps(row) + '\n')
    self._file.flush()

  def write_summaries(self, step, values, metadata=None):
    del step, values, metadata

  def write_images(self, step, images):
    del step, images

  def write_videos(self, step, videos):
    del step, videos

  def write_audios(self, step, audios, *, sample_rate):
    del step, audios, sample_rate

  def write_texts(self, step, texts):
    del step, texts

  def write_histograms(self, step, arrays, num_buckets=None):
    del step, arrays, num_buckets

  def write_hparams(self, hparams):
    del hparams

  def flush(self) -> None:
    self._file.flush()

  def close(self) -> None:
    self._file.close()


def _step_of(line: str) -> float:
  try:
    return json.loads(line)['step']
  except json.JSONDecodeError:
    return np.inf


def create_writer(model_dir: epath.PathLike, resume_step: int) -> metric_writers.MetricWriter:
  """The writers of process 0, in background threads; on other processes one that writes nothing."""
  if jax.process_index() != 0:
    return metric_writers.MultiWriter([])
  return metric_writers.AsyncMultiWriter(
    [
      metric_writers.LoggingWriter(),
      metric_writers.SummaryWriter(os.fspath(model_dir)),
      JsonlWriter(epath.Path(model_dir) / 'metrics.jsonl', resume_step),
    ]
  )
