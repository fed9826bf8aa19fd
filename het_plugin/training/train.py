"""The training run: validation, set-up and resumption around the loop."""

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from clu import metric_writers as clu_writers
from clu import parameter_overview
from etils import epath
from flax import traverse_util

from het_plugin.operations import (
  heartbeat,
  interruptible,
  operations,
  preemption,
  profiling,
  resources,
  run_clock,
  run_lock,
  verdict,
)
from het_plugin.training import actions as actions_lib
from het_plugin.training import (
  checkpoint_reader,
  checkpoints,
  compilation_cache,
  evaluation,
  metric_writers,
  partitioning,
  prefetch,
  processes,
  step_watch,
  warm_start,
)
from het_plugin.training import loop as loop_lib
from het_plugin.training import loss_spikes as loss_spikes_lib
from het_plugin.training import metrics as metrics_lib
from het_plugin.training import nonfinite as nonfinite_lib
from het_plugin.training import step as step_lib
from het_plugin.training.actions import ActionMode
from het_plugin.training.state import TrainState

_log = logging.getLogger(__name__)

PyTree = Any


def get_dataset(cfg: Any, rows: Any) -> Any:
  """`het_plugin.data.get_dataset`, imported when it is called: TensorFlow comes with it."""
  from het_plugin import data

  return data.get_dataset(cfg, rows)


def task_info(name: str, vocabulary: str | None = None) -> Any:
  """`het_plugin.data.task_info`, imported when it is called."""
  from het_plugin import data

  return data.task_info(name, vocabulary)


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
  total_steps: int,
  eval_steps: int,
  eval_period: int,
  stats_period: int | None = None,
  random_seed: int = 0,
  actions: Mapping[str | ActionMode, Sequence[actions_lib.BaseAction]] | None = None,
  get_dataset_fn: Callable[[Any, Any], Any] = get_dataset,
  task_info_fn: Callable[[str], Any] = task_info,
  summarize_config_fn: Callable[[str, clu_writers.MetricWriter, int], None] | None = None,
  profile_steps: tuple[int, int] | None = None,
  profiler_port: int | None = None,
  nonfinite: nonfinite_lib.NonFinitePolicy = nonfinite_lib.DEFAULT_POLICY,
  loss_spikes: loss_spikes_lib.LossSpikes | None = None,
  config: str = '',
  check_config_fn: Callable[[int, Mapping[str, Any]], None] | None = None,
  limits: verdict.Limits | None = None,
  began: float | None = None,
) -> tuple[int, TrainState]:
  """Trains a model; argument names and meanings are those of t5x's `train`.

  All processes call it. On SIGTERM it saves a checkpoint after the step in progress and raises
  `preemption.Preempted`, a SystemExit with code 42; called again with the same model_dir, it goes
  on with the next example. An evaluation that was due then runs first. While the compiler works,
  it raises at once: there is nothing new to save.

  Process 0 holds a lock on model_dir (`run_lock`).

  Args:
    model: an object with t5x's model surface. `model.validate(task_info)`, where it exists, is
      called with the task of every data set; `model.count_params(params)`, where it exists, goes to
      the log as the number of parameters without padding.
    train_dataset_cfg: a data set of at least total_steps batches; its batch_size is the global
      one.
    train_eval_dataset_cfg: evaluated over eval_steps batches; None for no train-eval.
    infer_eval_dataset_cfg: evaluated to its end, whenever train-eval runs; None for no infer-eval.
    checkpoint_cfg: what to save, and where the initial parameters come from.
    partitioner: placement of everything.
    trainer_cls: `Trainer`, or a partial of it that sets num_microbatches.
    model_dir: takes checkpoints, metrics.jsonl, event files and profiles.
    total_steps: the step to stop after, counted from the beginning of the run, not of this call.
    eval_steps: batches per train-eval (fewer where the data set ends).
    eval_period: steps between evaluations; one follows the last step in any case.
    stats_period: steps between writes of training metrics; None for eval_period.
    random_seed: of parameters, dropout and noise.
    actions: {'TRAIN' | 'TRAIN_EVAL' | 'INFER_EVAL': actions}.
    get_dataset_fn: (dataset config, row numbers of the global batch) -> BatchIterator.
    task_info_fn: task name, and the data set's vocabulary if it names one -> what the model's
      `validate` takes.
    summarize_config_fn: called once with (model_dir, writer, step), to write the configuration
      down.
    profile_steps: (first, last) step to profile, counted from 1; None for none.
    profiler_port: where process 0 listens for profilers, process i at profiler_port + i; None to
      listen nowhere.
    nonfinite: what to do at a step whose loss, gradient or update is not finite.
    loss_spikes: which losses to report in MODEL_DIR/loss_spikes.jsonl; None for none.
    config: the configuration as text, kept in the record of each checkpoint.
    check_config_fn: called in process 0, before data and the compiler are, with step and record of
      the newest checkpoint of a run that is resumed; its ValueError stops all processes.
    limits: how long to wait for a process that is dead or stuck, until this one ends with
      `exit_codes.LOST`; None for the defaults.
    began: `time.monotonic()` when the work for this run began, imports included; None for now.

  Returns:
    (last step, last train state).

  Raises:
    ValueError: a setting is wrong, or model_dir in use; one sentence, before anything is compiled.
    preemption.Preempted: after SIGTERM, with the checkpoint on disk.
    nonfinite.NonFiniteStop: a SystemExit with code 3, for a step that is not finite.
    checkpoints.SaveFailed: a checkpoint could not be written; a SystemExit with code 1.
  """
  clock = run_clock.RunClock(began=began)
  stats_period = eval_period if stats_period is None else stats_period
  _check_positive(
    total_steps=total_steps,
    eval_steps=eval_steps,
    eval_period=eval_period,
    stats_period=stats_period,
  )
  actions = actions_lib.parse_actions(actions)
  model_dir = epath.Path(model_dir)
  profiler = profiling.StepProfiler(model_dir / 'profile', profile_steps, clock)
  eval_cfgs = {
    ActionMode.TRAIN_EVAL: (train_eval_dataset_cfg, eval_steps),
    ActionMode.INFER_EVAL: (infer_eval_dataset_cfg, None),
  }
  eval_cfgs = {mode: (cfg, steps) for mode, (cfg, steps) in eval_cfgs.items() if cfg is not None}
  for cfg in (train_dataset_cfg, *(cfg for cfg, _ in eval_cfgs.values())):
    partitioner.check_batch_size(cfg.batch_size)
    if hasattr(model, 'validate'):
      # Of captions: the number of token ids depends on it.
      vocabulary = getattr(cfg, 'vocabulary', None)
      arguments = () if vocabulary is None else (vocabulary,)
      model.validate(task_info_fn(cfg.mixture_or_task_name, *arguments))

  with contextlib.ExitStack() as stack:
    notice = stack.enter_context(preemption.PreemptionNotice())
    stack.enter_context(run_lock.locked(model_dir))
    stack.enter_context(compilation_cache.in_directory(model_dir))
    if check_config_fn is not None:
      processes.in_the_first(lambda: _check_config(model_dir, check_config_fn))
    if profiler_port is not None:
      stack.enter_context(profiling.server(profiler_port))
    ops = stack.enter_context(operations.Operations(model_dir, clock, profiler, total_steps))
    beat = stack.enter_context(heartbeat.Heartbeat(model_dir, clock, total_steps, limits))

    def open_dataset(cfg: Any) -> Any:
      return get_dataset_fn(cfg, partitioner.batch_rows(cfg.batch_size))

    train_iter = open_dataset(train_dataset_cfg)
    init_rng, trainer_rng = jax.random.split(jax.random.key(random_seed))
    init = init_fn(model, train_iter.element_spec, init_rng)
    abstract_state = jax.eval_shape(init)
    axes = partitioner.get_mesh_axes(abstract_state)
    trainer = trainer_cls(
      model=model,
      partitioner=partitioner,
      train_state_axes=axes,
      rng=trainer_rng,
      halt_at_nonfinite=nonfinite.action == nonfinite_lib.STOP,
    )
    trainer.check_batch_size(train_dataset_cfg.batch_size)
    evaluators = {
      mode: evaluation.Evaluator(
        _task_name(cfg), open_dataset(cfg), cfg.batch_size, max_batches, partitioner
      )
      for mode, (cfg, max_batches) in eval_cfgs.items()
    }

    target = with_shardings(abstract_state, partitioner.shardings(axes))
    resources.check(target, checkpoint_cfg.save, model_dir, total_steps)
    checkpointer = checkpoints.Checkpointer(model_dir, checkpoint_cfg.save)
    stack.callback(checkpointer.close)

    # The state comes from the first of these that there is:
    #   1. the newest checkpoint in model_dir that can be read: this run, resumed;
    #   2. the parameters of checkpoint_cfg.restore, with a fresh optimizer at step 0: a warm start;
    #   3. the model's initial values.
    with clock.phase(run_clock.RESTORE):
      restored = checkpointer.restore(target)
      _check_enough_batches(train_iter, train_dataset_cfg.batch_size, restored, total_steps)
      if restored is not None:
        step, train_state = int(restored.train_state.step), restored.train_state
        _resume_dataset(train_iter, restored)
      else:
        restore = checkpoint_cfg.restore
        read = {} if restore is None else warm_start.restore_params(restore, target.params)
        step, lowered = 0, partitioner.partition(init, (), axes).lower()
        train_state = _compile(notice, step, lowered.compile)()
        train_state = train_state.replace(params=_overlay(train_state.params, read))
    clock.tick(step)
    if step > total_steps:
      raise ValueError(f'total_steps={total_steps} is below the step of the checkpoint, {step}.')

    evaluated = restored is None or restored.record['evaluated']
    writer = metric_writers.create_writer(model_dir, resume_step=step, evaluated=evaluated)
    stack.callback(writer.close)
    _log_parameters(model, train_state.params)
    if summarize_config_fn is not None:
      summarize_config_fn(str(model_dir), writer, step)
    context = actions_lib.ActionContext(
      model, partitioner, writer, str(model_dir), random_seed, step if evaluated else step - 1
    )
    for group in actions.values():
      for action in group:
        action.setup(context)
    if restored is not None:
      actions_lib.set_states(actions, restored.record.get('actions', {}))

    stack.callback(profiler.close)
    batches = stack.enter_context(
      prefetch.DevicePrefetcher(train_iter, partitioner, train_dataset_cfg.batch_size)
    )
    stack.callback(ops.report, writer)
    stack.push(beat.failing)  # before anything waits to be closed
    loop = loop_lib.TrainLoop(
      step=step,
      train_state=train_state,
      trainer=trainer,
      batches=batches,
      evaluators=evaluators,
      actions=actions,
      writer=writer,
      checkpointer=checkpointer,
      notice=notice,
      profiler=profiler,
      total_steps=total_steps,
      eval_period=eval_period,
      save_period=None if checkpoint_cfg.save is None else checkpoint_cfg.save.period,
      record={'config': config},
      clock=clock,
      watch=step_watch.StepWatch(
        model_dir,
        step,
        nonfinite,
        0 if restored is None else restored.record.get('skipped_steps', 0),
        loss_spikes,
      ),
    )
    stop = False
    if not evaluated:
      stop = loop.evaluate()
    if stop or step == total_steps:
      _log.info('The run is complete at step %d: nothing to train.', step)
      return step, train_state
    batch_spec = partitioner.batch_spec(train_iter.element_spec)
    with clock.phase(run_clock.COMPILE):
      compilation = trainer.compile_train(
        train_state, batch_spec, functools.partial(_compile, notice, step)
      )
    _log.info('Compiled the train step in %.1f s.', compilation.seconds)
    writer.write_scalars(step, {'train/timing/compile_seconds': compilation.seconds})
    del train_state  # The loop donates it.
    loop.run(
      metrics_lib.StepMetrics(
        stats_period,
        train_dataset_cfg.batch_size,
        compilation.flops,
        partitioner.mesh,
        loop.on_step,
      )
    )
    with clock.phase(run_clock.SAVE):
      checkpointer.wait_until_finished()
    return loop.step, loop.train_state


def _check_positive(**settings: int) -> None:
  for name, value in settings.items():
    if value < 1:
      raise ValueError(f'{name}={value} must be at least 1.')


def _check_config(
  model_dir: epath.Path, check_config_fn: Callable[[int, Mapping[str, Any]], None]
) -> None:
  if (newest := checkpoint_reader.newest_record(model_dir)) is not None:
    check_config_fn(*newest)


def _compile(notice: preemption.PreemptionNotice, step: int, compiler: Callable[[], Any]) -> Any:
  """What the compiler returns; or Preempted, at the step that the run starts with."""
  try:
    return interruptible.call(compiler, notice.reached)
  except interruptible.Interrupted:
    _log.warning('Preempted while compiling: nothing new to save at step %d.', step)
    raise preemption.Preempted(step, compiling=True) from None


def _check_enough_batches(
  train_iter: Any, batch_size: int, restored: checkpoints.Restored | None, total_steps: int
) -> None:
  if train_iter.num_batches is None:
    return
  step, position = 0, 0
  if restored is not None:
    step = int(restored.train_state.step)
    position = (restored.dataset_state or {'position': 0})['position']
  left = max(train_iter.num_batches - position // batch_size, 0)
  if left < total_steps - step:
    raise ValueError(
      f'total_steps={total_steps} must be at most {step + left}: at step {step} the training data '
      f'set has {left} batches of {batch_size} left; its num_epochs says how often it is read.'
    )


def _task_name(cfg: Any) -> str:
  task = cfg.mixture_or_task_name
  return task if isinstance(task, str) else task.name


def init_fn(
  model: Any, element_spec: Mapping[str, jax.ShapeDtypeStruct], rng: jax.Array
) -> Callable[[], TrainState]:
  """What makes the fresh state of a model for batches of these shapes."""
  shapes = {name: spec.shape for name, spec in element_spec.items()}
  types = {name: spec.dtype for name, spec in element_spec.items()}
  return lambda: TrainState.create(
    model.optimizer_def, model.get_initial_variables(rng, shapes, types)
  )


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
  """Shapes and where they are to lie, as one tree."""
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
  )


def _overlay(params: PyTree, read: Mapping[str, jax.Array]) -> PyTree:
  flat = traverse_util.flatten_dict(params, sep='/')
  return traverse_util.unflatten_dict(flat | dict(read), sep='/')


def _resume_dataset(train_iter: Any, restored: checkpoints.Restored) -> None:
  if restored.dataset_state is None:
    _log.warning('The checkpoint has no input position: the data set starts again.')
  else:
    train_iter.set_state(restored.dataset_state)


def _log_parameters(model: Any, params: PyTree) -> None:
  table = parameter_overview.get_parameter_overview(params, include_stats='sharding')
  _log.info('Parameters and their shardings:\n%s', table)
  if hasattr(model, 'count_params'):
    _log.info('Parameters without padding: %s.', model.count_params(params))
