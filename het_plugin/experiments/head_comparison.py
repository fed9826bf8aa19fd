"""Trains every head in the same way and compares them, as the quick start does.

The run of a head is complete if done.json is in its folder. Complete runs are not trained again,
and interrupted runs continue.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import special

import gin
from het_plugin import data, reporting
from het_plugin.experiments import trainings
from het_plugin.system import run_files, screen
from het_plugin.training import checkpoint_reader, partitioning

# Standard deviation of the difference between heads over seeds, after the 1,000 steps of the quick
# start: HET-XL minus DET with a learned tau was -0.064, 0.009 and -0.067 (studies/narrow_layers).
_SEED_SPREAD = 0.04
HEADS = {
  'det': 'DET',
  'det_learned_tau': 'DET, learned tau',
  'het': 'HET',
  'het_h': 'HET-H',
  'het_xl': 'HET-XL',
}
_EXAMPLES_FILE = 'examples.npz'
_NUM_EXAMPLES = 64
_NUM_PICTURES = 8
_STEP_TIME = 'step_time.json'
_LOSS_STEPS = 25  # between two looks at the loss


_NOTES = (
  'NLL: negative log-likelihood of the validation split in nats; prec@1: share of examples whose '
  'most probable class is the label; ECE: expected calibration error over 15 bins.',
  'extra: parameters beyond the deterministic head. Parameters are counted without the padding of '
  'the classes.',
  'ms/step: the heads are timed in turns, and this is the median. A head that an earlier start '
  'trained keeps its earlier value. The smaller the backbone, the larger the share of the noise.',
  'few-shot: ridge regression on the frozen pre-logits; glyphs_heldout has characters and '
  'typefaces that training did not show. Mean and standard error over draws of the shots.',
  'Chance is a uniform guess. The best possible predictions are the probabilities with which the '
  'labels were drawn: a classifier that knew them would have this NLL and precision.',
  'Each row is one run with one seed. `python -m het_plugin.quickstart --gin.RANDOM_SEED=1 '
  '--output_dir=DIR` takes another one.',
)


class TimedStep:
  """The compiled step of a head: shows the progress of its training, and is timed afterwards."""

  def __init__(self, trainer_cls: Callable[..., Any], progress: reporting.Progress):
    self._trainer_cls = trainer_cls
    self._progress = progress
    self.state = self._step = self._batch = None

  def trainer(self, **settings: Any) -> Any:
    """The trainer_cls of `train`; remembers the last batch."""
    trainer = self._trainer_cls(**settings)
    self._step = trainer.train_step
    steps = itertools.count()
    note = ''

    def train_step(state, batch):
      nonlocal note
      self._batch = batch
      state, metrics = self._step(state, batch)
      if next(steps) % _LOSS_STEPS == 0:  # waits for the step
        note = f'loss {metrics["loss"].compute():.3f}'
      self._progress.update(len(batch['index']), note)
      return state, metrics

    trainer.train_step = train_step
    return trainer

  @property
  def has_trained(self) -> bool:
    return self._batch is not None

  def seconds(self, steps: int) -> float:
    """Seconds per step, the mean of several steps."""
    start = time.perf_counter()
    for _ in range(steps):
      self.state, _ = self._step(self.state, self._batch)
    jax.block_until_ready(self.state)
    return (time.perf_counter() - start) / steps


def train_head(head: str, run: trainings.Training, run_dir: Path) -> TimedStep | None:
  """Trains a head to its end with a progress bar, and leaves its configuration parsed.

  Returns:
    The compiled step; None if there was nothing to train.
  """
  run.parse(run_dir)
  batch_size = gin.query_parameter('%BATCH_SIZE')
  total = gin.get_configurable(data.total_steps)() * batch_size
  done = max(checkpoint_reader.steps(run_dir), default=0) * batch_size
  with (
    screen.only_warnings(),
    reporting.Progress(HEADS[head], total, done, unit='examples') as progress,
  ):
    timed = TimedStep(gin.get_bindings('train')['trainer_cls'], progress)

    def finish(state):
      _write_examples(state.eval_params, run_dir)
      timed.state = state

    trainings.complete(run, run_dir, finish, trainer_cls=timed.trainer)
  return timed if timed.has_trained else None


def time_steps(steps: Mapping[Path, TimedStep], turns: int = 5, steps_per_turn: int = 3) -> None:
  """Writes the time per step of the trained heads into their folders.

  It is the median over turns that alternate between the heads, so that other load on the machine
  affects all of them.
  """
  for step in steps.values():
    step.seconds(1)
  times = [
    {folder: step.seconds(steps_per_turn) for folder, step in steps.items()} for _ in range(turns)
  ]
  for folder in steps:
    seconds = statistics.median(turn[folder] for turn in times)
    run_files.write_json(folder / _STEP_TIME, {'ms_per_step': 1e3 * seconds})


def ms_per_step(run_dir: Path) -> float | None:
  """Time per step as timed beside the other heads, else the median over the run."""
  timed = run_files.read_json(run_dir / _STEP_TIME) or {}
  metrics = run_files.read_lines(run_dir / 'metrics.jsonl')
  return timed.get('ms_per_step') or trainings.ms_per_step(metrics)


def row(head: str, run_dir: Path) -> dict[str, Any]:
  """The row of a finished run, from its files, with parameter counts of the configured model."""
  metrics = run_files.read_lines(run_dir / 'metrics.jsonl')
  task = gin.query_parameter('%MIXTURE_OR_TASK_NAME')
  final = trainings.final_evaluations(metrics)[f'training_eval/{task}']
  model, counts = trainings.configured_model()
  partitioner = gin.get_configurable(partitioning.PjitPartitioner)()
  lines = run_files.read_lines(run_dir / 'fewshot.jsonl')
  few_shot = reporting.fewshot_fields(x for x in lines if x['step'] == final['step'])
  return {
    'head': HEADS[head],
    'num_classes': model.head.num_classes,
    'pre_logits_dim': model.backbone.pre_logits_dim,
    'num_factors': getattr(model.head, 'num_factors', None),
    'mesh': f'{partitioner.data_shards}x{partitioner.model_shards}',
    **{name: final[name] for name in ('nll', 'precision_at_1', 'ece', 'tau')},
    'num_params': counts.total,
    'extra_params': counts.extra,
    'fewshot': average_over_datasets(few_shot['fewshot']),
    'fewshot_by_dataset': few_shot['fewshot'],
    'fewshot_stderr_by_dataset': few_shot['fewshot_stderr'],
    'steps': final['step'],
  }


def average_over_datasets(by_dataset: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
  """Accuracy by shots averaged over the data sets, the aggregate of table 22."""
  shots = {n for accuracies in by_dataset.values() for n in accuracies}
  return {n: statistics.fmean(a[n] for a in by_dataset.values() if n in a) for n in sorted(shots)}


def references(task: str, split: str) -> list[dict[str, Any]]:
  """Rows to compare the heads with: guessing, and what the labels were drawn from, if known."""
  info = data.classification_info(task)
  rows = [
    {'name': 'chance', 'nll': math.log(info.num_classes), 'precision_at_1': 1 / info.num_classes}
  ]
  if info.label_distribution and (examples := info.splits.get(split)):
    _, p = info.label_distribution(split, np.arange(examples))
    entropy = special.entr(p).sum(axis=1).mean()
    rows.append(
      {'name': 'best possible', 'nll': float(entropy), 'precision_at_1': float(p.max(1).mean())}
    )
  return rows


def sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Three lines on what the table shows, from its numbers."""
  by_head = {row['head']: row for row in rows}
  best = min(rows, key=lambda r: r['nll'])
  worst = max(rows, key=lambda r: r['nll'])
  found = [
    f'After {best["steps"]:,} steps {best["head"]} has the lowest NLL, {best["nll"]:.3f} nats per '
    f'example (guessing: {math.log(best["num_classes"]):.3f}). Its most probable class is the '
    f'label of {best["precision_at_1"]:.1%} of the unseen renderings (guessing: '
    f'{1 / best["num_classes"]:.2%}).'
  ]
  noisy = [row for row in rows if row['num_factors']]
  det = by_head.get(HEADS['det'])
  tau = by_head.get(HEADS['det_learned_tau'])
  if det and tau and noisy:
    noise = min(noisy, key=lambda r: r['nll'])
    change = noise['nll'] - tau['nll']
    if abs(change) < 2 * _SEED_SPREAD:
      verdict = (
        'one seed cannot show whether the noise helps, because in short runs this difference has a '
        f'standard deviation of about {_SEED_SPREAD} over seeds'
      )
    else:
      verdict = f'here noise {"lowers" if change < 0 else "raises"} the NLL'
    found.append(
      f'A learned temperature changes the NLL of DET by {tau["nll"] - det["nll"]:+.3f}. '
      f'{noise["head"]}, the best head with noise, changes it by a further {change:+.3f}: '
      f'{verdict}.'
    )
  else:
    found.append(
      f'The heads differ by {worst["nll"] - best["nll"]:.3f} nats, from {best["head"]} to '
      f'{worst["head"]}, whose NLL is {worst["nll"]:.3f}.'
    )
  large = max(rows, key=lambda r: r['num_params'])
  slow = max(rows, key=_pace)
  fast = min(rows, key=_pace)
  found.append(
    f'{large["head"]} has the most parameters, {large["num_params"]:,}; '
    f'{large["extra_params"]:,} of them are noise and temperature. A step of {slow["head"]} took '
    f'{_pace(slow) / max(_pace(fast), 1e-9):.1f} times as long as a step of {fast["head"]}.'
  )
  return found


def _pace(row: Mapping[str, Any]) -> float:
  return row['ms_per_step'] or 0.0


def _write_examples(params: Any, run_dir: Path) -> None:
  """Writes some validation examples with the predictions of the model.

  The file has image [N, S, S, C], and label, top (the most probable class) and probability (of
  that class), [N] each.
  """
  model = trainings.called('MODEL')
  cfg = data.one_pass(
    gin.query_parameter('%MIXTURE_OR_TASK_NAME'),
    gin.query_parameter('%EVAL_SPLIT'),
    image_size=gin.query_parameter('%TASK_FEATURE_LENGTHS')['image'],
    max_labels=1,
    batch_size=_NUM_EXAMPLES,
    bounded=True,
  )
  batch = next(iter(data.get_dataset(cfg, range(_NUM_EXAMPLES))))
  batch = {name: x[batch['mask'] > 0] for name, x in batch.items()}  # a split may have fewer
  predict = jax.jit(model.predict_batch_with_aux)
  top, aux = predict(jax.device_get(params), batch)
  np.savez(
    run_dir / _EXAMPLES_FILE,
    image=batch['image'],
    label=np.asarray(batch['label'])[:, 0],
    top=np.asarray(top)[:, 0],
    probability=np.exp(np.asarray(aux['log_prob'])[:, 0]),
  )


def make_report(
  rows: Sequence[Mapping[str, Any]],
  runs: Mapping[str, Path],
  yardsticks: Sequence[Mapping[str, Any]],
) -> reporting.Report:
  """Compares heads, from their rows (`row`), {head: folder} and rows to compare with."""
  shown = [
    {'name': row['head']}
    | {k: v for k, v in row.items() if not k.startswith('fewshot') and k not in ('head', 'steps')}
    | {'fewshot': row['fewshot_by_dataset'], 'fewshot_stderr': row['fewshot_stderr_by_dataset']}
    for row in rows
  ]
  titles = {HEADS[head]: run for head, run in runs.items()}
  trained = (
    f'Every head trained for the same {rows[0]["steps"]:,} steps on the same examples, then '
    'evaluated on unseen renderings.'
  )

  def draw():
    return trainings.draw_curves(titles, 'Training loss and temperature.') | {
      'examples': reporting.Figure(
        _examples(titles),
        "Unseen renderings in the order of the first head's confidence, with the most probable "
        'character of each head and its probability. Green agrees with the label. Labels may be '
        'wrong, and some characters look alike, so no head can be sure of them.',
        'Examples with the prediction of each head.',
        recolour=False,
      )
    }

  return reporting.Report(
    title='Heteroscedastic heads on rendered characters',
    introduction='\n'.join([trained, *sentences(rows)]),
    json=rows,
    row_title='head',
    rows=shown,
    references=yardsticks,
    notes=_NOTES,
    draw=draw,
    configs={title: (run / 'config.gin').read_text() for title, run in titles.items()},
  )


def _examples(titles: Mapping[str, Path]) -> bytes:
  """The picture of some examples, evenly spaced by the first head's probability of its answer."""
  info = data.classification_info(gin.query_parameter('%MIXTURE_OR_TASK_NAME'))
  names = info.shown_names or info.class_names or map(str, range(info.num_classes))
  characters = [(name.split() or [name])[0] for name in names]
  found = {title: np.load(run / _EXAMPLES_FILE) for title, run in titles.items()}
  first = next(iter(found.values()))
  order = np.argsort(-first['probability'], kind='stable')
  picked = order[np.linspace(0, len(order) - 1, _NUM_PICTURES).astype(int)]
  predictions = {
    title: [
      (characters[of['top'][i]], float(of['probability'][i]), of['top'][i] == of['label'][i])
      for i in picked
    ]
    for title, of in found.items()
  }
  return reporting.examples_png(
    first['image'][picked], [characters[first['label'][i]] for i in picked], predictions
  )
