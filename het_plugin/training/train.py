"""`train`: checks the settings, sets a run up or resumes it, and hands over to the loop."""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from clu import parameter_overview
from etils import epath

from het_plugin import data
from het_plugin.data import splits
from het_plugin.system import processes, ranges, run_files
from het_plugin.system.ranges import Count
from het_plugin.training import actions as actions_lib
from het_plugin.training import (
  batch_layout,
  checkpoint_reader,
  checkpoints,
  class_names,
  compilation_cache,
  evaluation,
  initial_state,
  metric_writers,
  partitioning,
  prefetch,
)
from het_plugin.training import loop as loop_lib
from het_plugin.training import metrics as metrics_lib
from het_plugin.training import nonfinite as nonfinite_lib
from het_plugin.training import observer as observer_lib
from het_plugin.training import step as step_lib
from het_plugin.training.actions import ActionMode
from het_plugin.training.state import TrainState

_log = logging.getLogger(__name__)


@ranges.checked
def train(
  *,
  model: Any,
  train_dataset_cfg: Any,
  train_eval_dataset_cfg: Any | None,
  infer_eval_dataset_cfg: Any | None = None,
  checkpoint_cfg: checkpoints.CheckpointConfig,
  partitioner: partitioning.PjitPartitioner,
  trainer_cls: Callable[..., step_lib.Trainer] = step_lib.Trainer,
  model_dir: epath.PathLike,
  total_steps: Count,
  eval_steps: Count,
  eval_period: Count,
  stats_period: Count | None = None,
  random_seed: int = 0,
  actions: Mapping[str, Sequence[actions_lib.BaseAction]] | None = None,
  get_dataset_fn: Callable[[Any, Any], Any] = data.get_dataset,
  task_info_fn: Callable[[str], Any] = data.task_info,
  nonfinite: nonfinite_lib.NonFinitePolicy = nonfinite_lib.DEFAULT_POLICY,
  profile_steps: tuple[int, int] | None = None,
  profiler_port: int | None = None,
  evaluate_again: bool = False,
  config: Any | None = None,
  observer: observer_lib.Observer | None = None,
) -> tuple[int, TrainState]:
  """Trains a model; argument names and meanings are as in t5x's `train`.

  All processes call it. When the observer asks to stop, it saves a checkpoint after the step in
  progress and raises `exit_codes.Preempted`, a SystemExit with code 42. Called again with the same
  model_dir, it continues with the next example; an evaluation that was due runs first.

  Args:
    model: an object with t5x's model surface. If it has `validate(task_info)`, this is called with
      the task of every data set. If it has `count_params(params)`, the log has this number of
      parameters without padding.
    train_dataset_cfg: a data set of at least total_steps batches; its batch_size is global.
    train_eval_dataset_cfg: evaluated over eval_steps batches; None for no train-eval.
    infer_eval_dataset_cfg: evaluated to its end, whenever train-eval runs; None for no infer-eval.
    checkpoint_cfg: what to save, and where the initial parameters come from.
    partitioner: places arrays and computation.
    trainer_cls: `Trainer`, or a partial of it that sets num_microbatches.
    model_dir: takes checkpoints, metrics.jsonl, event files, and class_names.txt if the task that
      `validate` is called with has names of classes.
    total_steps: the step to stop after, counted from the beginning of the run, not of this call.
    eval_steps: batches per train-eval (fewer if the data set ends).
    eval_period: steps between evaluations; one follows the last step in any case.
    stats_period: steps between writes of training metrics; None for eval_period.
    random_seed: seed of parameters, dropout and noise.
    actions: {'TRAIN' | 'TRAIN_EVAL' | 'INFER_EVAL': actions}.
    get_dataset_fn: (dataset config, row numbers of the global batch) -> BatchIterator.
    task_info_fn: (task name, and the vocabulary of the data set if it names one) -> the argument
      of the model's `validate`.
    nonfinite: what to do at a step whose loss, gradient or update is not finite.
    profile_steps: (first, last) step that the observer profiles, counted from 1; None for none.
    profiler_port: process i listens for profilers at profiler_port + i; None to listen nowhere.
    evaluate_again: whether a run that is complete is evaluated once more, as now configured; the
      new lines of metrics.jsonl replace the lines of its last evaluation.
    config: the configuration, with the interface of `config.changes.RunConfig`, which process 0
      calls: `check` on the record of the newest checkpoint and on what the training data are now,
      and `write` before the first step. Its `text` is in the record of each checkpoint. None if
      there is none to check or keep.
    observer: watches the run. With None, model_dir is not locked and SIGTERM not noticed.

  Returns:
    (last step, last train state).

  Raises:
    ValueError: a setting is wrong, or model_dir is in use. The run's configuration, metrics and
      list of starts are then as they were.
    exit_codes.Preempted: SIGTERM arrived; the checkpoint is on disk.
    nonfinite.NonFiniteStop: a step is not finite; a SystemExit with code 3.
    checkpoints.SaveFailed: a checkpoint could not be written; a SystemExit with code 1.
  """
  if os.fspath(model_dir).startswith('~'):
    raise ValueError(f'model_dir={model_dir}: only a shell expands ~; write the full path')
  observer = observer or observer_lib.Observer()
  actions = actions_lib.parse_actions(actions)
  save_cfg = checkpoint_cfg.save
  schedule = loop_lib.Schedule(
    total_steps=total_steps,
    eval_steps=eval_steps,
    eval_period=eval_period,
    stats_period=eval_period if stats_period is None else stats_period,
    save_period=None if save_cfg is None else save_cfg.period,
  )
  eval_cfgs = {
    ActionMode.TRAIN_EVAL: (train_eval_dataset_cfg, eval_steps),
    ActionMode.INFER_EVAL: (infer_eval_dataset_cfg, None),
  }
  eval_cfgs = {mode: (cfg, steps) for mode, (cfg, steps) in eval_cfgs.items() if cfg is not None}
  for mode in (ActionMode.TRAIN_EVAL, ActionMode.INFER_EVAL):
    if actions.get(mode) and mode not in eval_cfgs:
      raise ValueError(
        f'train.actions has {type(actions[mode][0]).__name__} for {mode}, but '
        f'train.{mode.lower()}_dataset_cfg is None, so it would never run'
      )
  dataset_cfgs = [train_dataset_cfg, *(cfg for cfg, _ in eval_cfgs.values())]
  infos = _check_datasets(dataset_cfgs, model, task_info_fn)
  names = getattr(infos[0], 'class_names', None) if infos else None
  model_dir = epath.Path(model_dir)
  used = _used_data(train_dataset_cfg, infos)
  check_run = functools.partial(
    _check_run, model_dir, config, _task_name(train_dataset_cfg), names, used
  )
  checked = processes.in_the_first(check_run)
  most_rows = json.loads(checked)['most_rows'] if checked else None

  with contextlib.ExitStack() as stack:
    run = observer_lib.ObservedRun(model_dir, total_steps, profile_steps, profiler_port)
    stack.enter_context(observer.observing(run))

    def open_dataset(cfg: Any, size: int) -> Any:
      rows = partitioner.batch_rows(size)
      if size == cfg.batch_size:
        return get_dataset_fn(cfg, rows)
      return batch_layout.FilledBatches(get_dataset_fn, cfg, rows, size)

    batch_size = train_dataset_cfg.batch_size
    whole = getattr(model, 'needs_whole_batch', False)
    lay_out = functools.partial(batch_layout.layout, batch_size, partitioner, most_rows, whole)
    size = lay_out().size
    train_iter = open_dataset(train_dataset_cfg, size)
    init_rng, trainer_rng = jax.random.split(jax.random.key(random_seed))
    restore_cfg = checkpoint_cfg.restore
    if restore_cfg is not None and restore_cfg.starts_afresh:
      # With that run's seed the same head would begin again, which its backbone has learned to fit.
      init_rng = jax.random.fold_in(init_rng, 1)
    init = initial_state.init_fn(model, train_iter.element_spec, init_rng)
    axes, target = initial_state.placed(init, partitioner)
    trainer = trainer_cls(
      model=model,
      partitioner=partitioner,
      train_state_axes=axes,
      rng=trainer_rng,
      halt_at_nonfinite=nonfinite.action == nonfinite_lib.STOP,
    )
    layout = lay_out(trainer.num_microbatches or 1)
    trainer.num_microbatches = layout.num_microbatches
    trainer.check_batch_size(layout.size)
    if layout.change:
      _log.info('%s', layout.change)
    if layout.size != size:  # another number of microbatches is bound now
      train_iter = open_dataset(train_dataset_cfg, layout.size)
    evaluators = {}
    for mode, (cfg, max_batches) in eval_cfgs.items():
      shards = 1 if most_rows is None else partitioner.data_shards
      size = batch_layout.filled(cfg.batch_size, shards)
      evaluators[mode] = evaluation.Evaluator(
        _task_name(cfg), open_dataset(cfg, size), size, max_batches, partitioner
      )

    # Tracing finds what is wrong with the model, while nothing is written yet.
    traced = trainer.trace_train(target, partitioner.batch_spec(train_iter.element_spec))
    metrics: dict[ActionMode, dict[str, tuple[str, ...]]] = {ActionMode.TRAIN: {'train': ()}}
    for mode, evaluator in evaluators.items():
      metrics[mode] = {evaluator.task: evaluator.trace(trainer, target)}

    observer.begin()
    # Another training may have saved its checkpoint while this one waited for its end.
    processes.in_the_first(functools.partial(check_run, checked))
    stack.enter_context(compilation_cache.in_directory(model_dir))
    checkpointer = checkpoints.Checkpointer(model_dir, save_cfg)
    stack.callback(checkpointer.close)
    # The state comes from the first of these that exists:
    #   1. the newest checkpoint in model_dir that can be read: the run is resumed;
    #   2. the parameters of checkpoint_cfg.restore, with a fresh optimizer at step 0: a warm start;
    #   3. the model's initial values.
    with observer.phase(observer_lib.RESTORE):
      restored = checkpointer.restore(target)
      initial_state.check_enough_batches(train_iter, batch_size, restored, total_steps)
    stays = False  # stopped, by an action of TRAIN
    if restored is None:
      with observer.phase(observer_lib.INITIALISE):
        train_state = initial_state.begin(
          init, target, axes, restore_cfg, partitioner, model, names
        )
      start = checkpoints.RunState(train_state)
    else:
      start = restored
      kept = class_names.read(model_dir)  # those of its older checkpoints, too
      names = kept if names and kept and len(kept) == len(names) else names
      if start.dataset_state is None:
        _log.warning('The checkpoint has no input position: the data set starts again.')
      else:
        train_iter.set_state(start.dataset_state)
      stays = start.record.get('stopped') == loop_lib.stopped_by(actions, schedule)
      is_last = start.step == total_steps
      # An evaluation follows the last step, also if a later one was to be the last.
      missing = is_last and start.record.get('last_evaluation', total_steps) != total_steps
      if evaluators and missing or evaluate_again and (is_last or stays):
        start = dataclasses.replace(start, record={**start.record, 'evaluated': False})
    if start.step > total_steps:
      raise ValueError(
        f'total_steps={total_steps} is below the step of the checkpoint, {start.step}.'
      )

    writer = metric_writers.RunWriter(model_dir, start.step, start.evaluated)
    stack.callback(writer.close)
    context = actions_lib.ActionContext(
      model=model,
      partitioner=partitioner,
      writer=writer,
      model_dir=str(model_dir),
      random_seed=random_seed,
      evaluated_step=start.step if start.evaluated else start.step - 1,
      input_shapes={name: spec.shape for name, spec in train_iter.element_spec.items()},
      resize=getattr(train_eval_dataset_cfg or train_dataset_cfg, 'resize', None),
    )
    for mode, group in actions.items():
      for action in group:
        action.setup(dataclasses.replace(context, metrics=metrics[mode]))
    actions_lib.set_states(actions, start.record.get('actions', {}))
    observer.resumed(start.step)
    _describe_run(model, start, config, names, model_dir, writer)

    batches = prefetch.DevicePrefetcher(train_iter, partitioner, layout.size)
    stack.enter_context(batches)
    # Called first on exit, before anything waits to be closed.
    stack.push(lambda _, error, trace: observer.leaving(error, writer))
    loop = loop_lib.TrainLoop(
      step=start.step,
      train_state=start.train_state,
      schedule=schedule,
      trainer=trainer,
      batches=batches,
      evaluators=evaluators,
      actions=actions,
      writer=writer,
      checkpointer=checkpointer,
      about={
        'config': '' if config is None else config.text,
        'data': used,
        'most_rows': layout.most_rows,
        'class_names': class_names.digest(names),
        'image': [*context.input_shapes['image'][1:]] if 'image' in context.input_shapes else None,
      },
      guard=nonfinite_lib.NonFiniteGuard(
        nonfinite, model_dir, start.record.get('skipped_steps', 0)
      ),
      observer=observer,
      first_tau=start.record.get('first_tau'),
    )
    stopped = not start.evaluated and loop.evaluate()
    if stopped or stays or start.step == total_steps:
      _log.info('The run is complete at step %d: nothing to train.', start.step)
      return start.step, start.train_state
    compile_start = time.monotonic()
    with observer.phase(observer_lib.COMPILE):
      num_flops = trainer.compile_train(traced)
      processes.meet()
    seconds = time.monotonic() - compile_start
    _log.info('Compiled the train step in %.1f s.', seconds)
    writer.write_scalars(start.step, {'train/timing/compile_seconds': seconds})
    loop.run(
      metrics_lib.StepMetrics(
        schedule.stats_period,
        batch_size,
        num_flops,
        partitioner.mesh,
        loop.on_step,
        start.record.get('open_period'),
      )
    )
    with observer.phase(observer_lib.SAVE):
      checkpointer.wait_until_finished()
    return loop.step, loop.train_state


def _check_datasets(
  cfgs: Iterable[Any],
  model: Any,
  task_info_fn: Callable[..., Any],
) -> list[Any]:
  """The infos of the tasks, which `model.validate` accepts; [] for a model without `validate`.

  The first task has the numbers of the classes. ValueError if another one numbers them differently.
  """
  infos = []
  for cfg in cfgs:
    if hasattr(cfg, 'resize'):
      data.preprocess.check_images(cfg.resize, model, 'the model')
    if hasattr(model, 'validate'):
      # The number of token ids of captions depends on the vocabulary.
      vocabulary = getattr(cfg, 'vocabulary', None)
      arguments = () if vocabulary is None else (vocabulary,)
      infos.append(task_info_fn(cfg.mixture_or_task_name, *arguments))
      model.validate(infos[-1])
      own, first = (getattr(info, 'class_names', None) for info in (infos[-1], infos[0]))
      class_names.check(f'mixture_or_task_name={_task_name(cfg)}', own, first)
  return infos


def _used_data(cfg: Any, infos: Sequence[Any]) -> dict[str, Any]:
  """What the task knows of the training data, as JSON values: they may change under its name."""
  info = infos[0] if infos else None
  found = {'the version of the training data': getattr(info, 'version', None)}
  if hasattr(info, 'splits') and hasattr(cfg, 'split'):
    part = splits.resolve(cfg.split, info.splits, _task_name(cfg))
    found['the number of training examples'] = part.num_records
  return found


def _check_run(
  model_dir: epath.Path,
  config: Any | None,
  task: str,
  names: Sequence[str] | None,
  used: Mapping[str, Any],
  checked: str = '',
) -> str:
  """Compares a run with its newest checkpoint, unless it is `checked`, an earlier answer.

  Returns:
    JSON of the step of the checkpoint, and of the `BatchLayout.most_rows` in it; '' without one.
  """
  if model_dir.is_file():
    raise ValueError(f'model_dir={model_dir} is a file: give a folder')
  run_files.check_links(model_dir)
  if bucket := run_files.mounted_bucket(model_dir):
    _log.warning(
      'model_dir=%s is in a bucket mounted by GCSFuse, which renames a folder file by file, unless '
      'the bucket has a hierarchical namespace: a crash in a save may leave half a checkpoint, '
      'which is set aside. Better name the bucket: gs://%s/...',
      model_dir,
      bucket,
    )
  newest = checkpoint_reader.newest_record(model_dir)
  if newest is None:
    return ''
  step, record = newest
  found = json.dumps({'step': step, 'most_rows': record.get('most_rows')})
  if found != checked:
    if config is not None:
      config.check(*newest, model_dir, used)
    class_names.check(f'mixture_or_task_name={task}', names, class_names.read(model_dir))
  return found


def _task_name(cfg: Any) -> str:
  task = cfg.mixture_or_task_name
  return task if isinstance(task, str) else task.name


def _describe_run(
  model: Any,
  start: checkpoints.RunState,
  config: Any | None,
  names: Sequence[str] | None,
  model_dir: epath.Path,
  writer: metric_writers.RunWriter,
) -> None:
  """Logs the parameters, and writes the configuration and the names of the classes."""
  params = start.train_state.params
  table = parameter_overview.get_parameter_overview(params, include_stats='sharding')
  _log.info('Parameters and their shardings:\n%s', table)
  if hasattr(model, 'count_params'):
    _log.info('Parameters without padding: %s.', model.count_params(params))
  if jax.process_index() != 0:
    return
  if names:
    class_names.write(model_dir, names)
  if config is not None:
    # Indented text is code in Markdown.
    indented = ''.join(f'    {line}\n' for line in config.text.splitlines())
    writer.write_texts(start.step, {'gin_config': indented})
    config.write(str(model_dir), start.step)
